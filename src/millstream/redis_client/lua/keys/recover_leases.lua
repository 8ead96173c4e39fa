#!lua flags=allow-oom
-- End the leases of a worker's name that the worker does not know of: of its last life, or of a lost reply.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 consumer   4 its incarnation   5 most entries of one lease
--       6.. tokens of the leases that it has
-- REPLY number of leases of earlier lives, number of those that were never heard of
-- ERROR STALE when a newer run has taken over
--
-- INVARIANT  A worker has its name to itself, so what an earlier life of it held nobody works on. The first entry of
--   such a line may be what ended that life, and is counted; one whose lease was not heard of has not begun.

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
local earlier, unheard = 0, 0
for i = 1, #owners, 2 do
  local name = owners[i]
  local _, life, holder = string.match(owners[i + 1], '^(%d+) (%S+) (.*)$')
  if holder == consumer and not known[owners[i + 1]] then
    if life == incarnation then
      unheard = unheard + 1
    else
      earlier = earlier + 1
      local head = redis.call('LINDEX', line_of(name), 0)
      if head then redis.call('HINCRBY', KEYS[4], head .. 'l', 1) end
    end
    end_lease(group, name, tonumber(ARGV[5]))
    line_up(name, true)
  end
end
wake(earlier + unheard)
return {earlier, unheard}
