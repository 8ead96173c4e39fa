#!lua flags=allow-oom
-- End the leases under a worker's name that the worker does not know of: of an earlier process, or of a lost reply.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 consumer   4 its incarnation   5 most entries of one lease
--       6 milliseconds that a queue waits after the first loss of a lease on its first entry (0 = not at all)
--       7 factor of each further wait   8 longest wait in milliseconds   9 most entries that run together
--       10.. tokens of the leases that it has
-- REPLY number of leases of earlier processes, number of those in lost replies
-- ERROR STALE when a newer run has taken over
--
-- INVARIANT  One live worker has a name, so no process works on the leases of an earlier one. The first entry of such a
--   queue may have ended that process: it is counted, and waits. One whose lease was in a lost reply has not begun.

-- include ids
-- include refusal
-- include key_queues
-- include lost_leases

local group, consumer, incarnation = ARGV[2], ARGV[3], ARGV[4]
local refusal = stale(ARGV[1], redis.call('HGET', KEYS[1], 'epoch'))
if refusal then return refusal end
local probe = redis.pcall('XPENDING', KEYS[7], group, '-', '+', 1)
if probe.err then return named(probe, 'XPENDING', KEYS[7]) end

local known = {}
for i = 10, #ARGV do known[ARGV[i]] = true end
local claimed, now = tonumber(ARGV[5]), now_ms()
local delay_ms, factor, max_delay_ms = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local together = tonumber(ARGV[9])
local owners = redis.call('HGETALL', OWNERS)
local earlier, unknown = 0, 0
for i = 1, #owners, 2 do
  local name = owners[i]
  local _, process, holder = string.match(owners[i + 1], '^(%d+) (%S+) (.*)$')
  if holder == consumer and not known[owners[i + 1]] then
    if process == incarnation then
      unknown = unknown + 1
      end_lease(group, name, claimed)
      make_ready(name, true)
    else
      earlier = earlier + 1
      end_lost_lease(group, name, claimed, now, delay_ms, factor, max_delay_ms, together)
    end
  end
end
notify_idle(earlier + unknown) -- queues that back off count, too: a notified worker learns when they are due
return {earlier, unknown}
