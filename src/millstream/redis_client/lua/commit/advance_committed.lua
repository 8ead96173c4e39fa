#!lua
-- End a batch: move the committed id to its last entry, and drop the key offsets if none lies beyond it.
--
-- KEYS  1 meta (hash)   2 key offsets (hash)   3 crash counts (hash)   4 incomplete entries (hash)
-- ARGV  1 token: the run's epoch   2 id of the last entry of the batch
-- REPLY 1 if the committed id moved, 0 if it was there already
-- ERROR STALE when the token is older than the epoch
--
-- INVARIANT  The committed id never goes back, and offsets are dropped only by a call that moves it past all of them: a
--   batch that died half-done may have left offsets beyond the end of a smaller batch that is planned in its place.
--   Deferred entries count as committed here; their crash counts are kept.

-- include ids
-- include key_queues

local found = redis.call('HMGET', KEYS[1], 'epoch', 'committed_id', 'max_offset', 'takeover_offset')
local refusal = stale(ARGV[1], found[1])
if refusal then return refusal end
if found[2] and not less(found[2], ARGV[2]) then
  return 0
end
redis.call('HSET', KEYS[1], 'committed_id', ARGV[2])
if not (found[3] and less(ARGV[2], found[3])) then
  redis.call('UNLINK', KEYS[2])
  if not has_queues() then redis.call('UNLINK', KEYS[3]) end
end
if found[4] and not less(ARGV[2], found[4]) then
  redis.call('HDEL', KEYS[1], 'takeover_offset')
  redis.call('UNLINK', KEYS[4])
end
return 1
