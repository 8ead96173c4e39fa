#!lua
-- End the wait of key queues whose keys have left their earlier partition, and store the states of these keys.
--
-- KEYS  as in commit.lua, of the new partition
-- ARGV  1 the fence of the earlier partition   2 '1' if states expire   3.. of each queue: name, its text in `awaiting`
--       before the earlier partition was read, the state ('' = none; as export_keys.lua returns it)
-- REPLY number of queues that wait no more
--
-- INVARIANT  A state is stored once, before any entry of its key runs here: `awaiting` had the same text before the state
--   was read as it has now, and no text occurs twice. Until `imported` is cleared, which comes after the state is gone
--   from the earlier partition, no state is imported from there again. Lease tokens go on growing.

-- include key_queues
-- include migration_state
-- include field_expiry
-- include expiring_state

-- A state that was stored and cannot expire would stay so: its key is not imported again.
local fields_expire = ARGV[2] == '1' and can_fields_expire(KEYS[3])
if fields_expire and not redis.acl_check_cmd('HPEXPIREAT', KEYS[3], 1, 'FIELDS', 1, 'f') then
  return redis.error_reply('NOPERM HPEXPIREAT ' .. KEYS[3])
end

local function store(key, state)
  if ARGV[2] ~= '1' then return redis.call('HSET', KEYS[3], key, state) end
  local space = string.find(state, ' ', 1, true)
  local expires_at, blob = string.sub(state, 1, space - 1), string.sub(state, space + 1)
  if tonumber(expires_at) < 0 then
    redis.call('HSET', KEYS[3], key, blob)
  elseif fields_expire then
    redis.call('HSET', KEYS[3], key, blob)
    redis.call('HPEXPIREAT', KEYS[3], expires_at, 'FIELDS', 1, key)
  else
    redis.call('HSET', KEYS[3], key, mark_expiry(blob, expires_at))
  end
end

local ended, ready = 0, 0
for i = 3, #ARGV, 3 do
  local name, seen, state = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if redis.call('HGET', AWAITING, name) == seen then
    local key = string.sub(name, 2)
    if state ~= '' and redis.call('HSETNX', IMPORTED, key, 1) == 1 then store(key, state) end
    if redis.call('HGET', PARKED, name) == awaiting_text(name) then redis.call('HDEL', PARKED, name) end
    redis.call('HDEL', AWAITING, name)
    ended = ended + 1
    if redis.call('HEXISTS', OWNERS, name) == 0 and make_ready(name) then ready = ready + 1 end
  end
end
local fence = tonumber(redis.call('HGET', KEYS[1], 'fence') or 0)
if tonumber(ARGV[1]) > fence then redis.call('HSET', KEYS[1], 'fence', ARGV[1]) end
notify_idle(ready)
return ended
