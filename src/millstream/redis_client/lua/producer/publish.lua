#!lua
-- Publish a batch of entries to a stream, at once or later, and once only, however often the batch is sent.
--
-- KEYS  1 the stream   2 the producer (string: sequence number of its last batch, then the ids of that batch's entries)
--       3 due (sorted set: id of a delayed message -> Unix ms)   4 delayed (hash: id -> msgpack of its items)
--       5.. none, or for each entry the caller's own id (string: the entry id of the first entry with it)
-- ARGV  1 sequence number of this batch, growing from 1
--       2 length to trim the stream to, about ('' = never)   3 most entries it may hold ('' = any number)
--       4 delay in ms ('' = none)   5 how long callers' ids are remembered, in ms, and the number, if that is longer
--       6 for a partition, the newest generation of partitions that the producer knows, else ''
--       then any number of runs of entries with the same field names, each:
--         number of fields, number of entries, the names, then the values of each entry in the names' order
-- REPLY the ids of the entries or delayed messages, separated by spaces; '' if a later batch has been written
-- ERROR FULL and the number of entries: the stream has no room for the batch, nothing is written
--       CLOSED and a generation: the partition was closed for one that the producer does not know, nothing is written
--       PARTITIONED: the stream is a partition, and the producer gave no generation
--
-- INVARIANTS  The entries are added if and only if the producer's number moves, so a batch whose reply was lost may be
--   sent again and gets the same ids, and a copy of it that comes late, over a broken connection, is skipped. The
--   number is kept for a day after the last batch, or as long as callers' ids. Of entries with the same caller's id, the first is added. Once a
--   partition is closed for a generation, no producer of an older one adds an entry, but still gets its earlier ids. A
--   delayed message is in `due` if and only if it is in `delayed`. No flag allow-oom: at maxmemory all of it is refused
--   before any write.

local REMEMBERED_S = math.max(86400, math.ceil(tonumber(ARGV[5]) / 1000))
local MOST_FIELDS = 3900 -- beyond that, unpack overflows Lua's stack
local OPTIONS, FIXED_KEYS = 6, 4
local PARTITION = string.sub(KEYS[3], 1, -4) .. 'partition' -- without 'due'

local call, args, stream = redis.call, ARGV, KEYS[1]
local sequence, maxlen, limit, delay, window, generation = args[1], args[2], args[3], args[4], args[5], args[6]

local found = call('TYPE', stream)['ok']
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. stream .. ' holds a ' .. found .. ' where a stream is needed')
end

local at, entries = OPTIONS + 1, 0
while at <= #args do
  local fields, count = tonumber(args[at]), tonumber(args[at + 1])
  if fields < 1 or fields > MOST_FIELDS then
    return redis.error_reply('ERR an entry of ' .. fields .. ' fields cannot be published')
  end
  at, entries = at + 2 + fields * (1 + count), entries + count
end
local deduplicated = #KEYS > FIXED_KEYS
if at ~= #args + 1 or (deduplicated and #KEYS ~= FIXED_KEYS + entries) then
  return redis.error_reply('ERR the batch is not well-formed')
end

local last = call('GET', KEYS[2])
if last then
  local number, ids = string.match(last, '^(%d+) ?(.*)$')
  if tonumber(number) >= tonumber(sequence) then
    -- A write, so that a WAIT after a repeated batch waits for a replica that has the first one as well.
    call('EXPIRE', KEYS[2], REMEMBERED_S)
    return number == sequence and ids or ''
  end
end

local needed = call('HGET', PARTITION, 'generation')
if needed and generation == '' then return redis.error_reply('PARTITIONED ' .. stream) end
if needed and tonumber(needed) > tonumber(generation) then return redis.error_reply('CLOSED ' .. needed) end

local new, seen = entries, {}
for i = FIXED_KEYS + 1, #KEYS do
  if seen[KEYS[i]] or call('GET', KEYS[i]) then new = new - 1 end
  seen[KEYS[i]] = true
end
local waiting = delay == '' and 0 or call('ZCARD', KEYS[3])
if limit ~= '' and new > 0 then
  local held = call('XLEN', stream) + waiting
  if held + new > tonumber(limit) then
    return redis.error_reply('FULL ' .. held)
  end
end

local now = call('TIME')
local arrival = now[1] * 1000000 + now[2]
local due = delay ~= '' and string.format('%.0f', math.ceil(arrival / 1000) + tonumber(delay))

local function append(items, count)
  return call('XADD', stream, '*', unpack(items, 1, count))
end

local function append_and_trim(items, count)
  return call('XADD', stream, 'MAXLEN', '~', maxlen, '*', unpack(items, 1, count))
end

-- The time of arrival in microseconds makes an id; messages that are due together keep the order of arrival.
local function delay_entry(items)
  local id
  repeat
    id = string.format('%.0f', arrival)
    arrival = arrival + 1
  until call('HSETNX', KEYS[4], id, cmsgpack.pack(items)) == 1
  call('ZADD', KEYS[3], due, id)
  return id
end

local add = due and delay_entry or maxlen ~= '' and append_and_trim or append

local function add_once(items, count, key)
  local id = call('GET', key)
  if not id then
    id = add(items, count)
    call('SET', key, id, 'PX', window)
  end
  return id
end

local add_entry = deduplicated and add_once or add
local ids, number = {}, 0
at = OPTIONS + 1
while at <= #args do
  local fields, count = tonumber(args[at]), tonumber(args[at + 1])
  local items = {}
  for i = 1, fields do
    items[2 * i - 1] = args[at + 1 + i]
  end
  at = at + 1 + fields
  for _ = 1, count do
    for i = 1, fields do
      items[2 * i] = args[at + i]
    end
    at = at + fields
    number = number + 1
    ids[number] = add_entry(items, 2 * fields, KEYS[FIXED_KEYS + number])
  end
  at = at + 1
end
if generation ~= '' and not needed then call('HSET', PARTITION, 'generation', generation) end
local reply = table.concat(ids, ' ')
call('SET', KEYS[2], sequence .. ' ' .. reply, 'EX', REMEMBERED_S)
return reply
