#!lua
-- Forget what a handler has done on one stream, so that it is processed anew.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the run's epoch, which has been begun   2 consumer group of the workers
-- REPLY nothing of use
-- ERROR STALE when the token is not the epoch: the run that is to process it anew must have begun first, so that
--   nothing an older run still commits comes after the forgetting
--
-- INVARIANT  The epoch stays. Dead letters and outputs stay. Keys that were parked go on.

-- include ids
-- include key_queues
-- include group_state

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('STALE token ' .. ARGV[1] .. ' is not the epoch')
end
redis.call('HDEL', KEYS[1], 'frontier', 'floor', 'top', 'committed', 'written', 'dead', 'refused')
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], KEYS[6])
forget_lines()
if find_group(ARGV[2]) then delete_consumers(ARGV[2]) end -- what is pending was in lines
return 1
