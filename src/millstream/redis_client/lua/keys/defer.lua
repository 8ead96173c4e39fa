#!lua
-- Defer messages on Spark: they wait in the queue of their key, as on workers, and their batch can end.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the run's epoch   2 consumer group of the workers, then for each key queue:
--         name, its expected offset ('' = none), or 'queue' if its first entry was run from it
--         'append' (behind others of its key), 'backoff' (until its next attempt), 'limit' (until it may ask for
--         a permit again) or 'park' (until an operator acts)
--         milliseconds from now, for 'backoff'; the value of the limit's field, for 'limit'; the reason, for 'park'; else ''
--         number of failed attempts on its first entry, or ''
--         why the last one failed: a line, then the traceback; or ''
--         number of ids, the ids: all entries of the key in the batch from the first deferred one on ('queue': the first)
-- REPLY list of the numbers (1 = first) of those that were refused, of which nothing was changed: their offset has
--       moved on, the key waits by now, or does not wait any more
-- ERROR STALE when a newer run has taken over
--
-- INVARIANT  A deferred entry gets an offset like a committed one, in the same step: up to the committed id, all
--   entries are committed or queued, and a queued entry beyond it has an offset. So a batch that is repeated defers
--   nothing twice. Being pending, deferred entries are kept from trimming, and any tool can see them.

-- include ids
-- include key_queues
-- include failed_attempts
-- include limited_queues
-- include group_state

local group = ARGV[2]
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'committed_id', 'max_offset')
local committed_id, max_offset = meta[2], meta[3]
local refusal = stale(ARGV[1], meta[1])
if refusal then return refusal end
local is_there = redis.call('EXISTS', KEYS[7]) == 1 -- a deleted stream is not recreated
if is_there then keep_queued_pending(group, committed_id) end -- before entries are added

local now = now_ms()

-- Whether the entries may be appended to a queue: they are in none yet, and others wait there only for 'append'.
local function may_append(name, expected, how, first)
  if (redis.call('HGET', KEYS[2], name) or '') ~= expected then return false end
  if committed_id and not less(committed_id, first) then return false end
  return is_deferred(name) == (how == 'append')
end

local function add(name, ids)
  if is_there then assign_pending(group, WAITING, ids) end -- first, as it may be refused and the others cannot be repeated
  for i = 1, #ids, MAX_UNPACK do
    redis.call('RPUSH', queue_of(name), unpack(ids, i, math.min(i + MAX_UNPACK - 1, #ids)))
  end
  redis.call('HSET', KEYS[2], name, ids[#ids])
  if not max_offset or less(max_offset, ids[#ids]) then max_offset = ids[#ids] end
end

local function back_off_or_park(name, how, detail, head, failed, last_error)
  redis.call('HDEL', KEYS[4], head) -- the task survived it
  if failed ~= '' then store_failed_attempts(head, failed, last_error) end
  if redis.call('HEXISTS', PARKED, name) == 1 then return end
  if how == 'park' then
    redis.call('HSET', PARKED, name, now .. ' ' .. detail)
  elseif how == 'limit' then
    redis.call('ZADD', BACKOFF, due_of_limited(detail, name, now), name)
  else
    redis.call('ZADD', BACKOFF, now + tonumber(detail), name)
  end
end

local refused, number, at = {}, 0, 3
while at <= #ARGV do
  number = number + 1
  local name, expected, how, detail, failed, last_error, count = unpack(ARGV, at, at + 6)
  count = tonumber(count)
  local ids = {unpack(ARGV, at + 7, at + 6 + count)}
  at = at + 7 + count
  local accepted
  if expected == 'queue' then
    accepted = redis.call('LINDEX', queue_of(name), 0) == ids[1]
    if accepted then redis.call('LREM', READY, 1, name) end
  else
    accepted = may_append(name, expected, how, ids[1])
    if accepted then add(name, ids) end
  end
  if not accepted then
    refused[#refused + 1] = number
  elseif how ~= 'append' then
    back_off_or_park(name, how, detail, ids[1], failed, last_error)
  end
end
if max_offset then redis.call('HSET', KEYS[1], 'max_offset', max_offset) end
return refused
