#!lua
-- Close a partition for a generation: no producer that knows only older ones adds an entry to it from now on.
--
-- KEYS  1 the stream   2 the partition (hash: generation, close_id)
-- ARGV  1 the generation
-- REPLY the last id of older generations (the close id)
-- ERROR WRONGTYPE when the stream is something else
--
-- INVARIANT  The generation never goes back, and the close id stays what it was when the generation was raised, however
--   often and by whichever process it is closed.

local found = redis.call('TYPE', KEYS[1])['ok']
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. KEYS[1] .. ' holds a ' .. found .. ' where a stream is needed')
end
local known = redis.call('HMGET', KEYS[2], 'generation', 'close_id')
if known[2] and tonumber(known[1]) >= tonumber(ARGV[1]) then return known[2] end

local close_id = '0-0'
if found == 'stream' then
  local items = redis.call('XINFO', 'STREAM', KEYS[1])
  for i = 1, #items, 2 do
    if items[i] == 'last-generated-id' then close_id = items[i + 1] end
  end
end
redis.call('HSET', KEYS[2], 'generation', ARGV[1], 'close_id', close_id)
return close_id
