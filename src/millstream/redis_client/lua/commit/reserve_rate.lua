#!lua
-- Reserve the next messages of a handler's rate on one stream, for one of the workers that share it.
--
-- KEYS  1 meta (hash; `rate_at` is when the next reservation may begin, in microseconds of the server's clock; `rate` is
--         what an operator has set: messages a second, and since when in Unix milliseconds)
-- ARGV  1 messages a second   2 number of messages   3 the rate of an operator that the caller knows ('' = none)
-- REPLY microseconds to wait before they are read; -1 if an operator has set another rate: nothing is reserved
--
-- INVARIANT  Reservations follow each other as far apart as the rate demands, so all workers together keep it (the
--   generic cell rate algorithm, ITU-T I.371, with the reservation made ahead). A reservation is never cancelled: if
--   its worker dies, the handler loses so many messages of its rate, once.

local MAX_RESERVED, MIN_RATE = 1000, 0.000001

local found = redis.call('HMGET', KEYS[1], 'rate_at', 'rate')
local rate, since = string.match(found[2] or '', '^([%d.e+-]+) (%d+)$')
local override = rate and #rate <= 32 and #since <= 14 and tonumber(rate) or nil
if override and not (override >= MIN_RATE and override < math.huge) then override = nil end -- another program wrote it
if override ~= tonumber(ARGV[3]) then return -1 end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local duration = tonumber(ARGV[2]) * 1000000 / tonumber(ARGV[1])
local at = tonumber(found[1] or 0)
-- Workers never reserve so far ahead: the clock went back with a failover, or the rate was lower before.
if at < now or at > now + MAX_RESERVED * duration then at = now end
redis.call('HSET', KEYS[1], 'rate_at', string.format('%.0f', at + duration))
return math.ceil(at - now)
