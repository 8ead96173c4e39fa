#!lua
-- Publish the next rows that a batch has staged for one stream, about a thousand or a megabyte.
--
-- KEYS  1 the stream   2 chunk counter (hash: left, fresh)   3.. staged chunks (lists), in the order of the tasks
-- ARGV  1 'MAXLEN', 'MINID' or ''   2 '~' or '='   3 its threshold
--       4 '1': skip rows whose id is not above the stream's last one, or ''
-- REPLY number of chunks left
-- ERROR LOST when chunks, or their counter, are missing; TOPPED with the stream's last id and name, when another writer has
--       added an entry above the id of the next row
--
-- INVARIANTS  A chunk leaves its list in the same step in which its rows become entries, so each row is published once
--   and in order, however often and by however many processes the script is called. Every check comes before the first
--   write of a chunk. The script may run at maxmemory: staged rows take no more memory as entries.

-- include ids

local MOST_ROWS, MOST_BYTES = 1000, 1000000

local stream, counter = KEYS[1], KEYS[2]
local found = redis.call('HMGET', counter, 'left', 'fresh')
if not found[1] then return redis.error_reply('LOST the chunk counter ' .. counter) end
local left = tonumber(found[1])
if found[2] == '1' then
  redis.call('XTRIM', stream, 'MAXLEN', 0)
  redis.call('HSET', counter, 'fresh', '')
end

local function last_id()
  if redis.call('EXISTS', stream) == 0 then return '0-0' end
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
end

local function publish(key, chunk)
  local rows = cmsgpack.unpack(chunk)
  local with_ids = rows[1][1] ~= '*'
  local top = with_ids and last_id()
  if with_ids and ARGV[4] == '' and not less(top, rows[1][1]) then
    return nil, redis.error_reply('TOPPED ' .. top .. ' ' .. stream)
  end
  for _, row in ipairs(rows) do
    if not with_ids or less(top, row[1]) then redis.call('XADD', stream, unpack(row)) end
  end
  redis.call('LPOP', key)
  left = redis.call('HINCRBY', counter, 'left', -1)
  return #rows
end

local rows, bytes, at = 0, 0, 3
while left > 0 and rows < MOST_ROWS and bytes < MOST_BYTES do
  local chunk = redis.call('LINDEX', KEYS[at], 0)
  if chunk then
    local count, refusal = publish(KEYS[at], chunk)
    if refusal then return refusal end
    rows, bytes = rows + count, bytes + #chunk
  else
    at = at + 1
    if at > #KEYS then return redis.error_reply('LOST ' .. left .. ' staged chunks of ' .. stream) end
  end
end
if ARGV[1] ~= '' and rows > 0 then redis.call('XTRIM', stream, ARGV[1], ARGV[2], ARGV[3]) end
return left
