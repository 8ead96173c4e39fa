#!lua
-- Decide that a proposed batch is published, say that all of it is, or withdraw it.
--
-- KEYS  1 record (hash: epoch, batch, state, attempt, proposed, manifest)
-- ARGV  1 epoch of the run   2 attempt   3 'decide', 'finish' or 'withdraw'
-- REPLY 1, or 0: 'withdraw' came too late, the batch is decided
-- ERROR STALE: 'decide' by a run that has been followed by a newer one, or whose proposal was replaced
--
-- INVARIANT  'decide' is the one step by which a batch comes to be published, in all its streams: before it none of its rows
--   is, after it all will be, by whoever comes next. A newer run that has begun may stage the batch anew, so an older one
--   decides nothing.

-- include ids

local found = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'attempt', 'proposed')
local state, ours = found[2], found[3] == ARGV[2]
if ARGV[3] == 'decide' then
  local refusal = stale(ARGV[1], found[1])
  if refusal then return refusal end
  if not (ours and state) then return redis.error_reply('STALE the proposal was replaced') end
  redis.call('HSET', KEYS[1], 'state', 'decided', 'batch', found[4])
elseif ours and state == 'decided' then
  if ARGV[3] == 'withdraw' then return 0 end
  redis.call('HDEL', KEYS[1], 'state', 'manifest')
elseif ours and ARGV[3] == 'withdraw' then
  redis.call('HDEL', KEYS[1], 'state', 'manifest', 'attempt')
end
return 1
