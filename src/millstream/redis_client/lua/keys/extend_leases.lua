#!lua flags=allow-oom
-- Renew leases of key queues.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the workers' epoch   2 lease in milliseconds from now   3.. name and lease token of each queue
-- REPLY lease tokens that hold their queue no longer
-- ERROR STALE when a newer run has taken over
--
-- INVARIANT  An expired lease may be renewed until another worker has leased the queue: no other worker was affected.

-- include ids
-- include key_queues

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'clock')
local refusal = stale(ARGV[1], meta[1])
if refusal then return refusal end

local now = now_ms()
local until_ms = now + tonumber(ARGV[2])
-- So that lease_keys.lua notices when it has gone back.
if not meta[2] or tonumber(meta[2]) < now then redis.call('HSET', KEYS[1], 'clock', string.format('%.0f', now)) end
local lost = {}
for i = 3, #ARGV, 2 do
  if holds_lease(ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', LEASES, 'XX', until_ms, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i + 1]
  end
end
return lost
