#!lua
-- Reserve the next messages of a handler's rate on one stream, for one of the workers that share it.
--
-- KEYS  1 meta (hash; `rate_at` is when the next reservation may begin, in microseconds of the server's clock)
-- ARGV  1 messages a second   2 number of messages
-- REPLY microseconds to wait before they are read
--
-- INVARIANT  Reservations follow each other as far apart as the rate demands, so all workers together keep it (the
--   generic cell rate algorithm, ITU-T I.371, with the reservation made ahead). A reservation is never cancelled: if
--   its worker dies, the handler loses so many messages of its rate, once.

local MAX_RESERVED = 1000

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local duration = tonumber(ARGV[2]) * 1000000 / tonumber(ARGV[1])
local at = tonumber(redis.call('HGET', KEYS[1], 'rate_at') or 0)
-- Workers never reserve so far ahead: the clock went back with a failover, or the rate was lower before.
if at < now or at > now + MAX_RESERVED * duration then at = now end
redis.call('HSET', KEYS[1], 'rate_at', string.format('%.0f', at + duration))
return math.ceil(at - now)
