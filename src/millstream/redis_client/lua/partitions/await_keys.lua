#!lua
-- Make key queues of a new partition wait until their keys have left the earlier one.
--
-- KEYS  as in commit.lua
-- ARGV  name of each queue, and the partition that its key comes from
-- REPLY number of queues that wait now and did not before
--
-- INVARIANT  It is called before the first entry of a key is enqueued here. A queue that has entries and does not wait
--   was found free to go on, and a key that has left an earlier partition never comes back to it.

-- include key_queues
-- include migration_state

local count = 0
for i = 1, #ARGV, 2 do
  local name = ARGV[i]
  local is_waiting = redis.call('HEXISTS', AWAITING, name) == 1 and redis.call('HEXISTS', PARKED, name) == 1
  if not is_waiting and redis.call('EXISTS', queue_of(name)) == 0 then
    local text = now_ms() .. ' migrating from ' .. ARGV[i + 1]
    redis.call('HSET', AWAITING, name, redis.call('HINCRBY', KEYS[1], 'moves', 1) .. ' ' .. text)
    redis.call('HSETNX', PARKED, name, text)
    count = count + 1
  end
end
return count
