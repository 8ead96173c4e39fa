#!lua flags=allow-oom
-- Keep members of a sorted set for a time, or remove them: a handler's live workers, an app's recent restarts.
--
-- KEYS  1 the set (sorted set: member -> until when, in Unix milliseconds)
-- ARGV  1 for how long, in milliseconds; 0 removes them   2... the members
-- REPLY 1

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local held_ms = tonumber(ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
for i = 2, #ARGV do
  if held_ms > 0 then
    redis.call('ZADD', KEYS[1], now_ms + held_ms, ARGV[i])
  else
    redis.call('ZREM', KEYS[1], ARGV[i])
  end
end
if held_ms > 0 then redis.call('PEXPIRE', KEYS[1], held_ms) end
return 1
