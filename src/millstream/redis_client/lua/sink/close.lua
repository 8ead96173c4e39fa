#!lua
-- Close the staged part of a batch for one stream: check that it is complete and can be published, create its
-- counter of chunks left to publish, and keep both until it is published.
--
-- KEYS  1 the stream   2 chunk counter of this attempt (hash: left, fresh)   3.. staged chunks (lists), in task order
-- ARGV  1 '': keep them for ever, else seconds until the counter expires
--       2 '1': the rows replace the stream's entries, or ''
--       3 id of the first row, if rows have ids and none may be skipped, or ''
--       4.. number of chunks in each list
-- REPLY number of chunks
-- ERROR WRONGTYPE when the key holds another type; NOPERM when the user may not write to it; LOST with the number and
--       key of missing chunks; TOPPED with the stream's last id and name, when the first row's id is not above it
--
-- INVARIANT  No row is visible yet. `left` is in the same slot as the chunks that it counts, so drain detects chunks
--   that Redis has lost.

-- include ids

local stream, counter = KEYS[1], KEYS[2]
local found = redis.call('TYPE', stream)['ok']
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. stream .. ' holds a ' .. found .. ' where a stream is needed')
end
if not redis.acl_check_cmd('XADD', stream, '*', 'f', 'v') then
  return redis.error_reply('NOPERM XADD ' .. stream)
end
if ARGV[3] ~= '' and found == 'stream' then
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' and not less(info[i + 1], ARGV[3]) then
      return redis.error_reply('TOPPED ' .. info[i + 1] .. ' ' .. stream)
    end
  end
end

local chunks = 0
for i = 3, #KEYS do
  local count = redis.call('LLEN', KEYS[i])
  if count ~= tonumber(ARGV[i + 1]) then
    return redis.error_reply('LOST ' .. ARGV[i + 1] - count .. ' staged chunks of ' .. KEYS[i])
  end
  chunks = chunks + count
end
redis.call('HSET', counter, 'left', chunks, 'fresh', ARGV[2])
if ARGV[1] == '' then
  for i = 3, #KEYS do redis.call('PERSIST', KEYS[i]) end
else
  redis.call('EXPIRE', counter, ARGV[1])
end
return chunks
