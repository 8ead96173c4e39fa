#!lua
-- See that all is there which a batch has staged for one stream, that it can be published, and keep it until it is.
--
-- KEYS  1 the stream   2 seal of this attempt (hash: left, fresh)   3.. staged chunks (lists), in the order of the tasks
-- ARGV  1 '': keep it for good, else how many seconds   2 '1': it replaces what the stream holds, or ''
--       3 id of the first entry, if the rows have ids and none may be passed over, or ''   4.. chunks in each list
-- REPLY number of chunks
-- ERROR WRONGTYPE when the key holds something else; NOPERM when the user may not write to it; LOST and what is missing;
--       TOPPED, the stream's last id and its name, when the first one is not above it
--
-- INVARIANT  Nothing is visible yet. `left` counts the chunks that are to be published, in the same slot as they are: a
--   Redis that forgets some of them is found out.

-- include ids
-- include refusal

local stream, seal = KEYS[1], KEYS[2]
local found = redis.call('TYPE', stream)['ok']
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. stream .. ' holds a ' .. found .. ' where a stream is needed')
end
-- An id that Redis never takes: what is refused before that are the user's rights.
local refused = redis.pcall('XADD', stream, '0-0', 'f', 'v').err
if denied(refused) then
  return redis.error_reply('NOPERM XADD ' .. stream)
end
if ARGV[3] ~= '' and found == 'stream' then
  local facts = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #facts, 2 do
    if facts[i] == 'last-generated-id' and not less(facts[i + 1], ARGV[3]) then
      return redis.error_reply('TOPPED ' .. facts[i + 1] .. ' ' .. stream)
    end
  end
end

local chunks = 0
for i = 3, #KEYS do
  local held = redis.call('LLEN', KEYS[i])
  if held ~= tonumber(ARGV[i + 1]) then
    return redis.error_reply('LOST ' .. ARGV[i + 1] - held .. ' staged chunks of ' .. KEYS[i])
  end
  chunks = chunks + held
end
redis.call('HSET', seal, 'left', chunks, 'fresh', ARGV[2])
if ARGV[1] == '' then
  for i = 3, #KEYS do redis.call('PERSIST', KEYS[i]) end
else
  redis.call('EXPIRE', seal, ARGV[1])
end
return chunks
