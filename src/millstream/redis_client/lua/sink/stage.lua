#!lua
-- Stage chunks of rows for one stream, once, however often they are sent.
--
-- KEYS  1 staged chunks (list), of one attempt at one task
-- ARGV  1 number of chunks that were staged before   2 how long they are kept, in seconds   3.. chunks (msgpack)
-- REPLY number of chunks that are staged now
-- ERROR LOST when fewer chunks are there than were staged
--
-- INVARIANT  No flag allow-oom: at maxmemory it is here that a batch waits, before anything of it is visible.

local held, before = redis.call('LLEN', KEYS[1]), tonumber(ARGV[1])
if held < before then return redis.error_reply('LOST ' .. before - held .. ' staged chunks of ' .. KEYS[1]) end
if held == before then
  for i = 3, #ARGV do held = redis.call('RPUSH', KEYS[1], ARGV[i]) end
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
return held
