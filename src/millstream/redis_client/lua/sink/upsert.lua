#!lua
-- Write a row as a hash or a JSON text, unless the stored one is newer.
--
-- KEYS  1 key of the row (hash or string)
-- ARGV  1 'hash' or 'json'   2 guard of the row: a whole number or an entry id   3 name of the field with the guard
--       json: 4 the text, an object that begins with the guard
--       hash: 4 number of fields to remove, their names, then names and values
-- REPLY 1, or 0: the stored row has a greater guard, and stays
-- ERROR WRONGTYPE when the key holds another type; UNGUARDED with the key, when its value has no guard
--
-- INVARIANT  The guard of a key never goes back, so rows may be written again, late, and in any order.

-- include ids

local key, kind, guard, field = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local wanted = kind == 'hash' and 'hash' or 'string'
local found = redis.call('TYPE', key)['ok']
if found ~= 'none' and found ~= wanted then
  return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. found .. ' where a ' .. wanted .. ' is needed')
end

local function stored_guard()
  if kind == 'hash' then return redis.call('HGET', key, field) end
  local head = '{"' .. field .. '":"'
  local text = redis.call('GETRANGE', key, 0, #head + 50)
  return string.sub(text, 1, #head) == head and string.match(text, '^[%d-]+', #head + 1)
end

local function as_id(text)
  return string.find(text, '-', 1, true) and text or text .. '-0'
end

if found ~= 'none' then
  local stored = stored_guard()
  if not stored or not string.find(stored, '^%d+%-?%d*$') then
    return redis.error_reply('UNGUARDED ' .. key)
  end
  if less(as_id(guard), as_id(stored)) then return 0 end
end
if kind == 'json' then
  redis.call('SET', key, ARGV[4])
  return 1
end
local removed = tonumber(ARGV[4])
redis.call('HSET', key, field, guard, unpack(ARGV, 5 + removed))
if removed > 0 then redis.call('HDEL', key, unpack(ARGV, 5, 4 + removed)) end
return 1
