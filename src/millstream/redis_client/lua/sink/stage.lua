#!lua
-- Stage chunks of rows for one stream, once, however often the call is repeated.
--
-- KEYS  1 staged chunks (list), of one attempt at one task
-- ARGV  1 number of chunks staged before   2 seconds until the list expires   3.. chunks (msgpack)
-- REPLY number of chunks staged now
-- ERROR LOST when the list has fewer chunks than were staged before
--
-- INVARIANT  No flag allow-oom: at maxmemory a batch waits here, before any of its rows is visible.

local count, before = redis.call('LLEN', KEYS[1]), tonumber(ARGV[1])
if count < before then return redis.error_reply('LOST ' .. before - count .. ' staged chunks of ' .. KEYS[1]) end
if count == before then
  for i = 3, #ARGV do count = redis.call('RPUSH', KEYS[1], ARGV[i]) end
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
return count
