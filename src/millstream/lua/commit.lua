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
--       NOPERM and others when Redis refuses one of the writes: the unit that it belongs to has no mark then
--
-- INVARIANTS  A unit is written only if its key's mark is what the caller loaded with the state, and all its ids
--   lie beyond the stream's committed frontier. So of two executions of a message at most one commits, in stream
--   order, and repeating a commit whose reply was lost is refused without harm. What can be refused comes before
--   the mark, since a script is not rolled back: a mark without its effects would be a loss. `top` is never below
--   any mark. No flag allow-oom: at maxmemory the whole script is refused before it writes anything.

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

local failure
local function try(...)
  if failure then return end
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then failure = reply end
end

local function add(key, maxlen, items)
  if maxlen == '0' then
    try('XADD', key, '*', unpack(ARGV, at + 1, at + items))
  else
    try('XADD', key, 'MAXLEN', '~', maxlen, '*', unpack(ARGV, at + 1, at + items))
  end
end

local refused, unit = {}, 0
local committed, written, dead = 0, 0, 0

while at < #ARGV and not failure do
  unit = unit + 1
  local mark, expected, first, last, messages = take(), take(), take(), take(), take_count()
  local accepted = (redis.call('HGET', KEYS[2], mark) or '') == expected
    and (not frontier or less(frontier, first))
  if not accepted then refused[#refused + 1] = unit end

  local change = take()
  local field = change ~= '' and take()
  local value = change == 'S' and take()
  local struck = take_count()
  local struck_at = at
  at = at + struck

  local outputs = take_count()
  for _ = 1, outputs do
    local key, maxlen, items = take_count(), take(), take_count()
    if accepted then add(KEYS[key], maxlen, items) end
    at = at + items
  end
  local letters = take_count()
  for _ = 1, letters do
    local items = take_count()
    if accepted then add(KEYS[5], '0', items) end
    at = at + items
  end

  if accepted then
    if value then try('HSET', KEYS[3], field, value) elseif field then try('HDEL', KEYS[3], field) end
    for i = struck_at + 1, struck_at + struck do try('HDEL', KEYS[4], ARGV[i]) end
    try('HSET', KEYS[2], mark, last)
    if not failure then
      if not top or less(top, last) then top = last end
      committed, written, dead = committed + messages, written + outputs, dead + letters
    end
  end
end

if committed > 0 then
  redis.call('HSET', KEYS[1], 'top', top)
  redis.call('HINCRBY', KEYS[1], 'committed', committed)
end
if written > 0 then redis.call('HINCRBY', KEYS[1], 'written', written) end
if dead > 0 then redis.call('HINCRBY', KEYS[1], 'dead', dead) end
if #refused > 0 then redis.call('HINCRBY', KEYS[1], 'refused', #refused) end
return failure or refused
