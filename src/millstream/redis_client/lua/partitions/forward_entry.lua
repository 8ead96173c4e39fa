#!lua
-- Add a redriven entry to the partition that owns its key now, once.
--
-- KEYS  1 the stream   2 the partition (hash: generation)   3 sent (string: id of the added entry)
-- ARGV  1 the newest generation of partitions that the caller knows   2 how long it is remembered, in ms   3.. items
-- REPLY id of the entry
-- ERROR CLOSED and a generation: the partition was closed for one that the caller does not know, nothing is written
--
-- INVARIANT  However often and by whichever process it is forwarded, it is added once, and never to a partition that
--   its key has left.

local known = redis.call('GET', KEYS[3])
if known then return known end
local needed = redis.call('HGET', KEYS[2], 'generation')
if needed and tonumber(needed) > tonumber(ARGV[1]) then return redis.error_reply('CLOSED ' .. needed) end
local id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 3)) -- first, as it may be refused
redis.call('SET', KEYS[3], id, 'PX', ARGV[2])
if not needed then redis.call('HSET', KEYS[2], 'generation', ARGV[1]) end
return id
