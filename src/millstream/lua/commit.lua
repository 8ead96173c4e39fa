#!lua
-- Commit the effects of messages: state, output entries, dead letters and the key's mark, in one atomic step.
--
-- KEYS  1 meta (hash: frontier, epoch, top, counters)   2 marks (hash)   3 state (hash)   4 strikes (hash)
--       5 dead letters (stream)                    6.. output streams
-- ARGV  1 token: the run's epoch
--       then any number of units, one per run of messages of one key (or one unkeyed message):
--         mark field, expected mark ('' = none), first id, last id, number of messages
--         state: '' (untouched), 'S' field value (set) or 'D' field (delete)
--         number of struck ids, the ids
--         number of outputs, each: index into KEYS, length to trim the stream to (0 = no trimming),
--           number of items, the items (name, value, ...)
--         number of dead letters, each: number of items, the items
-- REPLY list of the numbers (1 = first) of the units that were refused: their mark or the frontier has moved on,
--       so some of their messages are committed already; nothing of a refused unit is written
-- ERROR STALE when the token is older than the epoch: a newer run has taken over
--
-- INVARIANTS  `top` is never below any mark.  A unit is written only if its key's mark is what the caller loaded with the state, and all its ids
--   lie beyond the stream's committed frontier. So of two executions of a message at most one commits, in stream
--   order, and repeating a commit whose reply was lost is refused without harm. No flag allow-oom: at maxmemory
--   the whole script is refused before it writes anything.

local function split(id)
  return string.match(id, '^(%d+)-(%d+)$')
end

-- Ids are compared as digit strings: sequence numbers go up to 2^64, beyond what a Lua number holds exactly.
local function less_number(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

local function less(a, b)
  local a_ms, a_seq = split(a)
  local b_ms, b_seq = split(b)
  if a_ms ~= b_ms then return less_number(a_ms, b_ms) end
  return less_number(a_seq, b_seq)
end

local function check_type(key, wanted)
  local found = redis.call('TYPE', key)['ok']
  if found ~= 'none' and found ~= wanted then
    return 'WRONGTYPE ' .. key .. ' holds a ' .. found .. ' where a ' .. wanted .. ' is needed'
  end
end

for i = 1, #KEYS do
  local problem = check_type(KEYS[i], i >= 5 and 'stream' or 'hash')
  if problem then return redis.error_reply(problem) end
end

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'frontier', 'top')
local epoch, frontier, top = meta[1], meta[2], meta[3]
if epoch and less_number(ARGV[1], epoch) then
  return redis.error_reply('STALE token ' .. ARGV[1] .. ' is older than epoch ' .. epoch)
end

local at = 1
local function take()
  at = at + 1
  return ARGV[at]
end

local function take_count()
  return tonumber(take())
end

local refused, unit = {}, 0
local committed, written, dead = 0, 0, 0

while at < #ARGV do
  unit = unit + 1
  local mark, expected, first, last, messages = take(), take(), take(), take(), take_count()
  local accepted = (redis.call('HGET', KEYS[2], mark) or '') == expected
    and (not frontier or less(frontier, first))
  if accepted then
    redis.call('HSET', KEYS[2], mark, last)
    if not top or less(top, last) then top = last end
    committed = committed + messages
  else
    refused[#refused + 1] = unit
  end

  local change = take()
  if change ~= '' then
    local field = take()
    if change == 'D' then
      if accepted then redis.call('HDEL', KEYS[3], field) end
    else
      local value = take()
      if accepted then redis.call('HSET', KEYS[3], field, value) end
    end
  end

  for _ = 1, take_count() do
    local id = take()
    if accepted then redis.call('HDEL', KEYS[4], id) end
  end

  for _ = 1, take_count() do
    local key, maxlen, items = take_count(), take(), take_count()
    if accepted then
      if maxlen == '0' then
        redis.call('XADD', KEYS[key], '*', unpack(ARGV, at + 1, at + items))
      else
        redis.call('XADD', KEYS[key], 'MAXLEN', '~', maxlen, '*', unpack(ARGV, at + 1, at + items))
      end
      written = written + 1
    end
    at = at + items
  end

  for _ = 1, take_count() do
    local items = take_count()
    if accepted then
      redis.call('XADD', KEYS[5], '*', unpack(ARGV, at + 1, at + items))
      dead = dead + 1
    end
    at = at + items
  end
end

if committed > 0 then
  redis.call('HSET', KEYS[1], 'top', top)
  redis.call('HINCRBY', KEYS[1], 'committed', committed)
end
if written > 0 then redis.call('HINCRBY', KEYS[1], 'written', written) end
if dead > 0 then redis.call('HINCRBY', KEYS[1], 'dead', dead) end
if #refused > 0 then redis.call('HINCRBY', KEYS[1], 'refused', #refused) end
return refused
