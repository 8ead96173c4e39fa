#!lua
-- Add a redriven entry to the partition that owns its key now, once.
--
-- KEYS  1 the stream   2 the partition (hash: generation)   3 sent (string: id of the added entry)
--       4 dead letters of the handler there (stream)   5 edited copies that are under way there (hash)
-- ARGV  1 the newest generation of partitions that the caller knows   2 how long it is remembered, in ms
--       3 number of items of the dead letter whose edited copy the entry is, or 0; these items; then those of the entry
-- REPLY id of the entry
-- ERROR CLOSED and a generation: the partition was closed for one that the caller does not know, nothing is written
--
-- INVARIANT  However often and by whichever process it is forwarded, it is added once, and never to a partition that
--   its key has left. The dead letter of an edited copy comes with it.

local known = redis.call('GET', KEYS[3])
if known then return known end
local needed = redis.call('HGET', KEYS[2], 'generation')
if needed and tonumber(needed) > tonumber(ARGV[1]) then return redis.error_reply('CLOSED ' .. needed) end
local first = 4 + tonumber(ARGV[3])
if first > 4 then -- keys of another type are refused before the entry is added: it would be added again each time
  redis.call('XDEL', KEYS[4], '0-0')
  redis.call('HDEL', KEYS[5], '')
end
local id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, first)) -- first, as it may be refused
if first > 4 then
  local letter = redis.call('XADD', KEYS[4], '*', unpack(ARGV, 4, first - 1))
  redis.call('HSET', KEYS[5], id, letter, 'l' .. letter, id)
end
redis.call('SET', KEYS[3], id, 'PX', ARGV[2])
if not needed then redis.call('HSET', KEYS[2], 'generation', ARGV[1]) end
return id
