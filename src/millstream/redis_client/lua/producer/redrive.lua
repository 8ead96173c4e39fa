#!lua
-- Send one dead letter back to the tail of its stream, in one atomic step.
--
-- KEYS  1 dead letters (stream)   2 the input stream
-- ARGV  1 id of the dead letter   2.. items of the new entry (name, value, ...)
-- REPLY id of the new entry, or nil when the dead letter is gone (another redrive moved it)
--
-- INVARIANT  The dead letter is removed if and only if the entry is added, so a redrive that is killed at any point,
--   or run twice at once, neither loses nor doubles it. Refused whole at maxmemory, before any write.

local found = redis.call('TYPE', KEYS[2])['ok']
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. KEYS[2] .. ' holds a ' .. found .. ' where a stream is needed')
end
redis.call('XDEL', KEYS[1], '0-0') -- removes nothing: a user who may not remove the letter must not add the entry
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then
  return false
end
local id = redis.call('XADD', KEYS[2], '*', unpack(ARGV, 2))
redis.call('XDEL', KEYS[1], ARGV[1])
return id
