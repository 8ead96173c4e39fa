#!lua
-- Move a page of a consumer's pending entries into a batch: store the ids, and reassign the entries to the consumers of
-- the batch's portions.
--
-- KEYS  1 stream   2 record (hash: epoch, token, batch, step, gone)   3 ids of the batch (list)
-- ARGV  1 epoch of the run   2 group   3 consumer   4 token of the batches   5 number of the batch
--       6 entries in a portion   7 most entries in the batch
-- REPLY how many entries the batch has now; 1 if there may be more to add; how many were found gone since the last
--       report
-- ERROR STALE when a newer run owns the batches; NOGROUP when the group does not exist
--
-- INVARIANTS  The ids are stored in the step that reassigns the entries, so the list is the batch, whichever process
--   dies. The size of a portion is that of the first call. A repeated call goes on where the last one ended.

-- include ids
-- include run_fence

local PAGE = 500

local refusal = refuse_older(ARGV[1])
if refusal then return refusal end

local group, consumer = ARGV[2], ARGV[3]
local planned, step = redis.call('LLEN', KEYS[3]), tonumber(ARGV[6])
if planned > 0 then
  step = tonumber(redis.call('HGET', KEYS[2], 'step'))
else
  redis.call('HSET', KEYS[2], 'token', ARGV[4], 'batch', ARGV[5], 'step', ARGV[6])
end

local room = math.min(PAGE, step - planned % step, ARGV[7] - planned)
local page = room > 0 and redis.call('XPENDING', KEYS[1], group, '-', '+', room, consumer) or {}
local gone = 0
if #page > 0 then
  local ids = {}
  for i, item in ipairs(page) do ids[i] = item[1] end
  local portion = string.format('%s:%d', consumer, math.floor(planned / step))
  ids[#ids + 1] = 'JUSTID'
  local claimed = redis.call('XCLAIM', KEYS[1], group, portion, 0, unpack(ids))
  gone = #page - #claimed
  if #claimed > 0 then planned = redis.call('RPUSH', KEYS[3], unpack(claimed)) end
end
return {planned, #page > 0 and 1 or 0, redis.call('HINCRBY', KEYS[2], 'gone', gone)}
