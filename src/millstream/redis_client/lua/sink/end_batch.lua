#!lua
-- Finish a decided batch, all of which is published, or withdraw a batch that is not decided.
--
-- KEYS  1 record (hash: epoch, batch, state, attempt, manifest, withdrawn)   2 staged (set)
-- ARGV  1 attempt   2 'finish' or 'withdraw'
-- REPLY 1, or 0: 'withdraw' came too late, the batch is decided
--
-- INVARIANT  A delayed call of decide cannot decide a withdrawn attempt, whose rows are deleted.

local found = redis.call('HMGET', KEYS[1], 'state', 'attempt')
local decided = found[1] == 'decided' and found[2] == ARGV[1]
if ARGV[2] == 'finish' then
  if decided then redis.call('HDEL', KEYS[1], 'state', 'manifest') end
  return 1
end
if decided then return 0 end
redis.call('HSET', KEYS[1], 'withdrawn', ARGV[1])
return 1
