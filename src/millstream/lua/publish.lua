#!lua
-- Publish a batch of entries to a stream, once, however often the batch is sent.
--
-- KEYS  1 the stream   2 the producer (string: sequence number of its last batch)
-- ARGV  1 sequence number of this batch, growing from 1   2 length to trim the stream to, about ('' = never)
--       then any number of runs of entries with the same field names, each:
--         number of fields, number of entries, the names, then the values of each entry in the names' order
-- REPLY 1 if the batch was written, 0 if it had been written before
--
-- INVARIANTS  The entries are added if and only if the producer's number moves, so a batch whose reply was lost may
--   be sent again, and a copy of it that comes late, over a broken connection, is skipped too. The number is kept
--   for a day after the last batch. No flag allow-oom: at maxmemory all of it is refused before any write.

local REMEMBERED_S = 86400
local MOST_FIELDS = 3900 -- beyond that, unpack overflows Lua's stack

local call, args, stream, maxlen = redis.call, ARGV, KEYS[1], ARGV[2]

local found = call('TYPE', stream)['ok']
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. stream .. ' holds a ' .. found .. ' where a stream is needed')
end

local at = 3
while at <= #args do
  local fields, entries = tonumber(args[at]), tonumber(args[at + 1])
  if fields < 1 or fields > MOST_FIELDS then
    return redis.error_reply('ERR an entry of ' .. fields .. ' fields cannot be published')
  end
  at = at + 2 + fields * (1 + entries)
end
if at ~= #args + 1 then
  return redis.error_reply('ERR the batch is not well-formed')
end

local last = call('GET', KEYS[2])
if last and tonumber(last) >= tonumber(args[1]) then
  return 0
end
call('SET', KEYS[2], args[1], 'EX', REMEMBERED_S)

at = 3
while at <= #args do
  local fields, entries = tonumber(args[at]), tonumber(args[at + 1])
  local items = {}
  for i = 1, fields do
    items[2 * i - 1] = args[at + 1 + i]
  end
  at = at + 1 + fields
  for _ = 1, entries do
    for i = 1, fields do
      items[2 * i] = args[at + i]
    end
    at = at + fields
    if maxlen == '' then
      call('XADD', stream, '*', unpack(items, 1, 2 * fields))
    else
      call('XADD', stream, 'MAXLEN', '~', maxlen, '*', unpack(items, 1, 2 * fields))
    end
  end
  at = at + 1
end
return 1
