#!lua
-- Forget what a handler has done on one stream, so that it is processed anew.
--
-- KEYS  1 meta (hash)   2 marks (hash)   3 state (hash)   4 strikes (hash)   5 open entries (hash)
-- ARGV  1 token: the run's epoch, which has been begun
-- REPLY nothing of use
-- ERROR STALE when the token is not the epoch: the run that is to process it anew must have begun first, so that
--   nothing an older run still commits comes after the forgetting
--
-- INVARIANT  The epoch stays. Dead letters and outputs stay.

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('STALE token ' .. ARGV[1] .. ' is not the epoch')
end
redis.call('HDEL', KEYS[1], 'frontier', 'floor', 'top', 'committed', 'written', 'dead', 'refused')
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], KEYS[5])
return 1
