#!lua flags=allow-oom
-- End the leases under a worker's name that the worker does not know of: of an earlier process, or of a lost reply.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 consumer   4 its incarnation   5 most entries of one lease
--       6.. tokens of the leases that it has
-- REPLY number of leases of earlier processes, number of those in lost replies
-- ERROR STALE when a newer run has taken over
--
-- INVARIANT  One live worker has a name, so no process works on the leases of an earlier one. The first entry of such a
--   queue may have ended that process, and is counted; one whose lease was in a lost reply has not begun.

-- include ids
-- include refusal
-- include key_queues

local group, consumer, incarnation = ARGV[2], ARGV[3], ARGV[4]
local refusal = stale(ARGV[1], redis.call('HGET', KEYS[1], 'epoch'))
if refusal then return refusal end
local probe = redis.pcall('XPENDING', KEYS[7], group, '-', '+', 1)
if probe.err then return named(probe, 'XPENDING', KEYS[7]) end

local known = {}
for i = 6, #ARGV do known[ARGV[i]] = true end
local owners = redis.call('HGETALL', OWNERS)
local earlier, unknown = 0, 0
for i = 1, #owners, 2 do
  local name = owners[i]
  local _, process, holder = string.match(owners[i + 1], '^(%d+) (%S+) (.*)$')
  if holder == consumer and not known[owners[i + 1]] then
    if process == incarnation then
      unknown = unknown + 1
    else
      earlier = earlier + 1
      local head = redis.call('LINDEX', queue_of(name), 0)
      if head then redis.call('HINCRBY', KEYS[4], head .. 'l', 1) end
    end
    end_lease(group, name, tonumber(ARGV[5]))
    make_ready(name, true)
  end
end
notify_idle(earlier + unknown)
return {earlier, unknown}
