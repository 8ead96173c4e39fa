#!lua
-- Renew the claim on a page of a consumer's pending entries; or reassign them to another consumer.
--
-- KEYS  1 stream   2 record (hash: epoch, token, batch, step, gone)
-- ARGV  1 epoch of the run   2 group   3 consumer   4 the new consumer, often the same   5 first id of the page, or -
-- REPLY last id of the page, '' = there was none
-- ERROR STALE when a newer run owns the batches; NOGROUP when the group does not exist
--
-- INVARIANT  Entries that are not pending with the consumer are left alone: another consumer has claimed them.

-- include ids
-- include run_fence

local PAGE = 500

local refusal = refuse_older(ARGV[1])
if refusal then return refusal end

local page = redis.call('XPENDING', KEYS[1], ARGV[2], ARGV[5], '+', PAGE, ARGV[3])
if #page == 0 then return '' end
local ids = {}
for i, item in ipairs(page) do ids[i] = item[1] end
ids[#ids + 1] = 'JUSTID'
local claimed = redis.call('XCLAIM', KEYS[1], ARGV[2], ARGV[4], 0, unpack(ids))
if ARGV[3] ~= ARGV[4] then redis.call('HINCRBY', KEYS[2], 'gone', #page - #claimed) end
return page[#page][1]
