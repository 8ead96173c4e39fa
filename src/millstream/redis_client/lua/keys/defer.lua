#!lua
-- Set messages aside on Spark: they wait in the line of their key, as those that workers have, and their batch can end.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the run's epoch   2 consumer group of the workers, then for each line:
--         name, its expected mark ('' = none), or 'line' if its first entry was run from it
--         'join' (it waits behind others of its key), 'later' (for its next attempt) or 'park' (for a person)
--         milliseconds from now, for 'later'; the reason, for 'park'; else ''
--         number of failed attempts on its first entry, or ''
--         number of ids, the ids: all that there is of the key in the batch from the first of them on; of 'line', the first
-- REPLY list of the numbers (1 = first) of those that were refused, of which nothing was changed: their mark has moved on,
--       the key waits by now, or does not wait any more
-- ERROR STALE when a newer run has taken over
--
-- INVARIANT  What is set aside is marked as what is committed is, in the same step: up to the frontier, all is committed or in
--   a line, and what lies beyond it and is in a line has a mark. So a batch that is repeated sets nothing aside twice.
--   Pending, it is kept from being trimmed, and any tool can see it.

-- include ids
-- include key_queues
-- include group_state

local group = ARGV[2]
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'frontier', 'top')
local frontier, top = meta[2], meta[3]
local refusal = stale(ARGV[1], meta[1])
if refusal then return refusal end
local is_there = redis.call('EXISTS', KEYS[7]) == 1 -- what was deleted is not made anew
if is_there then keep_lines_pending(group, frontier) end -- before there is more of it

local now = now_ms()

-- Whether the entries go to the end of a line: as they are in no line yet, and others wait there if they should.
local function may_join(name, expected, how, first)
  if (redis.call('HGET', KEYS[2], name) or '') ~= expected then return false end
  if frontier and not less(frontier, first) then return false end
  return is_aside(name) == (how == 'join')
end

local function add(name, ids)
  if is_there then hold_by(group, WAITING, ids) end -- first, as what may be refused comes before what cannot be done twice
  for i = 1, #ids, PASSED_AT_ONCE do
    redis.call('RPUSH', line_of(name), unpack(ids, i, math.min(i + PASSED_AT_ONCE - 1, #ids)))
  end
  redis.call('HSET', KEYS[2], name, ids[#ids])
  if not top or less(top, ids[#ids]) then top = ids[#ids] end
end

local function put(name, how, detail, head, failed)
  redis.call('HDEL', KEYS[4], head) -- it was not cut short, whatever became of it
  if failed ~= '' then redis.call('HSET', KEYS[4], head .. 'f', failed) end
  if redis.call('HEXISTS', PARKED, name) == 1 then return end
  if how == 'park' then
    redis.call('HSET', PARKED, name, now .. ' ' .. detail)
  else
    redis.call('ZADD', BACKOFF, now + tonumber(detail), name)
  end
end

local refused, number, at = {}, 0, 3
while at <= #ARGV do
  number = number + 1
  local name, expected, how, detail, failed, count = unpack(ARGV, at, at + 5)
  count = tonumber(count)
  local ids = {unpack(ARGV, at + 6, at + 5 + count)}
  at = at + 6 + count
  local accepted
  if expected == 'line' then
    accepted = redis.call('LINDEX', line_of(name), 0) == ids[1]
    if accepted then redis.call('LREM', READY, 1, name) end
  else
    accepted = may_join(name, expected, how, ids[1])
    if accepted then add(name, ids) end
  end
  if not accepted then
    refused[#refused + 1] = number
  elseif how ~= 'join' then
    put(name, how, detail, ids[1], failed)
  end
end
if top then redis.call('HSET', KEYS[1], 'top', top) end
return refused
