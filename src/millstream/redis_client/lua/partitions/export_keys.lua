#!lua
-- Return which keys have left a partition: none of their entries can run or be committed here any more.
--
-- KEYS  as in commit.lua, of the earlier partition
-- ARGV  1 its close id   2 '1' if states expire   3.. names of key queues
-- REPLY nothing, if there may still be entries up to the close id that are in no queue; else the fence, and for each queue:
--       0 if it has entries or is parked, 1 if the key has left, or the state that it left: if states expire, when it
--       does (Unix milliseconds; below 0: never, or as the state itself says), a space, and the state
--
-- INVARIANT  Producers publish no entries of these keys here beyond the close id. So a reply other than 0 stays valid,
--   until the state is imported.

-- include ids
-- include key_queues
-- include closed_state
-- include field_expiry

local function state_of(key)
  local state = redis.call('HGET', KEYS[3], key)
  if not state or ARGV[2] ~= '1' then return state end
  local expires_at = -1
  if can_fields_expire(KEYS[3]) then expires_at = redis.call('HPEXPIRETIME', KEYS[3], 'FIELDS', 1, key)[1] end
  return string.format('%.0f ', expires_at) .. state
end

if not is_enqueued_to(ARGV[1]) then return {} end
local reply = {tonumber(redis.call('HGET', KEYS[1], 'fence') or 0)}
for i = 3, #ARGV do
  local name = ARGV[i]
  local stays = redis.call('EXISTS', queue_of(name)) == 1 or redis.call('HEXISTS', PARKED, name) == 1
  reply[i - 1] = stays and 0 or state_of(string.sub(name, 2)) or 1
end
return reply
