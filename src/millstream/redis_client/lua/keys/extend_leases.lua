#!lua flags=allow-oom
-- Extend leases on lines.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the workers' epoch   2 lease in milliseconds from now   3.. name and lease token of each line
-- REPLY names of the lines that the token does not hold any more
-- ERROR STALE when a newer run has taken over
--
-- INVARIANT  A lease that has run out may be extended until another worker has taken the line: nobody was harmed.

-- include ids
-- include key_queues

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'clock')
local refusal = stale(ARGV[1], meta[1])
if refusal then return refusal end

local now = now_ms()
local until_ms = now + tonumber(ARGV[2])
-- So that `take` sees if it has gone back.
if not meta[2] or tonumber(meta[2]) < now then redis.call('HSET', KEYS[1], 'clock', string.format('%.0f', now)) end
local lost = {}
for i = 3, #ARGV, 2 do
  if holds(ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', LEASES, 'XX', until_ms, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
