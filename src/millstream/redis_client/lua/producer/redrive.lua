#!lua
-- Send one dead letter, or an edited copy of it, to the tail of its stream, in one atomic step.
--
-- KEYS  1 dead letters (stream)   2 the input stream   3 edited copies that are under way (hash; include/resent.lua)
-- ARGV  1 id of the dead letter   2 'move': it goes with this step; or 'keep': it goes with the commit of the new entry
--       3.. items of the new entry (name, value, ...)
-- REPLY id of the new entry, or nil when the dead letter is gone (another redrive moved it)
-- ERROR RESENT and an id: the edited copy with this id is under way, nothing is written
--
-- INVARIANT  The dead letter is removed, or marked as resent, if and only if the entry is added, so a redrive that is
--   killed at any point, or run twice at once, neither loses nor doubles it. A mark whose copy was deleted from the
--   stream, or trimmed, means nothing: the dead letter is all that is left. Refused whole at maxmemory, before any write.

local found = redis.call('TYPE', KEYS[2])['ok']
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. KEYS[2] .. ' holds a ' .. found .. ' where a stream is needed')
end
redis.call('XDEL', KEYS[1], '0-0') -- removes nothing: a user who may not remove the letter must not add the entry
redis.call('HDEL', KEYS[3], '') -- nor may one who cannot mark it
if ARGV[2] == 'keep' and not redis.acl_check_cmd('HSET', KEYS[3], 'f', 'v') then
  return redis.error_reply('NOPERM HSET ' .. KEYS[3])
end
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then
  return false
end
local mark = 'l' .. ARGV[1]
local copy = redis.call('HGET', KEYS[3], mark)
if copy and #redis.call('XRANGE', KEYS[2], copy, copy) > 0 then
  return redis.error_reply('RESENT ' .. copy)
end
local id = redis.call('XADD', KEYS[2], '*', unpack(ARGV, 3))
if copy then redis.call('HDEL', KEYS[3], copy, mark) end
if ARGV[2] == 'keep' then
  redis.call('HSET', KEYS[3], id, ARGV[1], mark, id)
else
  redis.call('XDEL', KEYS[1], ARGV[1])
end
return id
