#!lua
-- Decide that a batch, whose parts are all staged and closed, is published.
--
-- KEYS  1 record (hash: epoch, batch, state, attempt, manifest, withdrawn)   2 staged (set)
-- ARGV  1 epoch of the run   2 number of the batch   3 attempt at it   4 manifest (msgpack)
-- REPLY 1
-- ERROR STALE: a newer run has begun, another attempt was decided, or this one was withdrawn
--
-- INVARIANT  This one step decides a batch for all its streams: before it no row is published, after it all will be, by
--   this run or the next. A newer run may stage the batch again, so an older one decides nothing. The record keeps the
--   decision until all rows are published, so no other batch comes before it or in its place.

-- include ids

local found = redis.call('HMGET', KEYS[1], 'epoch', 'batch', 'state', 'attempt', 'withdrawn')
local refusal = stale(ARGV[1], found[1])
if refusal then return refusal end
if found[3] == 'decided' and found[4] == ARGV[3] then return 1 end
if found[3] == 'decided' or (found[2] and not less_number(found[2], ARGV[2])) then
  return redis.error_reply('STALE another attempt was decided')
end
if found[5] == ARGV[3] then return redis.error_reply('STALE it was withdrawn') end
redis.call('HSET', KEYS[1], 'state', 'decided', 'batch', ARGV[2], 'attempt', ARGV[3], 'manifest', ARGV[4])
return 1
