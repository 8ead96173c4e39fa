#!lua flags=allow-oom
-- Announce the live workers of a handler, also of those that have read nothing yet, or withdraw them.
--
-- KEYS  1 live workers of the handler (sorted set: name -> until when, in Unix milliseconds)
-- ARGV  1 for how long, in milliseconds; 0 withdraws them   2... names of the workers
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
