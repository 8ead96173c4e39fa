#!lua
-- Say that all of a decided batch is published, or withdraw one that is not decided.
--
-- KEYS  1 record (hash: epoch, batch, state, attempt, manifest, withdrawn)   2 staged (set)
-- ARGV  1 attempt   2 'finish' or 'withdraw'
-- REPLY 1, or 0: 'withdraw' came too late, the batch is decided
--
-- INVARIANT  An attempt that was withdrawn is not decided later, by a call that was on its way: its rows are gone.

local found = redis.call('HMGET', KEYS[1], 'state', 'attempt')
local decided = found[1] == 'decided' and found[2] == ARGV[1]
if ARGV[2] == 'finish' then
  if decided then redis.call('HDEL', KEYS[1], 'state', 'manifest') end
  return 1
end
if decided then return 0 end
redis.call('HSET', KEYS[1], 'withdrawn', ARGV[1])
return 1
