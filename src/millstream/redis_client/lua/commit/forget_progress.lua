#!lua
-- Drop a handler's progress on one stream, so that it is processed anew.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the run's epoch, which has begun   2 consumer group of the workers
-- REPLY nothing of use
-- ERROR STALE when the token is not the epoch: the run that is to process the stream anew must have begun first, so
--       that an older run cannot commit after the progress is dropped
--
-- INVARIANT  The epoch stays. Dead letters and outputs stay. Parked keys go on.

-- include ids
-- include key_queues
-- include group_state

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('STALE token ' .. ARGV[1] .. ' is not the epoch')
end
redis.call('HDEL', KEYS[1], 'committed_id', 'takeover_offset', 'max_offset', 'committed', 'written', 'dead', 'skipped', 'refused')
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], KEYS[6])
drop_queues()
if find_group(ARGV[2]) then delete_consumers(ARGV[2]) end -- the pending entries were in key queues
return 1
