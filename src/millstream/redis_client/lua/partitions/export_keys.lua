#!lua
-- Say which keys have left a partition: nothing of them can run or be committed here any more.
--
-- KEYS  as of commit.lua, of the earlier partition
-- ARGV  1 its seal   2.. names of lines
-- REPLY nothing, if there may still be entries up to the seal that are in no line; else the fence, and for each line:
--       0 if it has entries or is parked, 1 if the key has left, or the state that it left
--
-- INVARIANT  Producers publish nothing of these keys here beyond the seal. So what is answered with other than 0 stays so,
--   until the state is fetched.

-- include ids
-- include key_queues
-- include closed_state

if not routed_to(ARGV[1]) then return {} end
local reply = {tonumber(redis.call('HGET', KEYS[1], 'fence') or 0)}
for i = 2, #ARGV do
  local name = ARGV[i]
  local stays = redis.call('EXISTS', line_of(name)) == 1 or redis.call('HEXISTS', PARKED, name) == 1
  reply[i] = stays and 0 or redis.call('HGET', KEYS[3], string.sub(name, 2)) or 1
end
return reply
