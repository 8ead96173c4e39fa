#!lua
-- Begin a run of a sink: assign an epoch above those of all earlier runs, or return the one that the run has.
--
-- KEYS  1 record (hash: epoch, batch, state, attempt, manifest, withdrawn)   2 the run (string: its epoch)
-- ARGV  1 seconds until the key of the run expires
-- REPLY epoch, 1 if it is new, the manifest of the decided batch that is not fully published ('' = none)
-- ERROR STALE when a newer run has begun
--
-- INVARIANT  The epoch never goes back. It is at least the server's time in microseconds, so that a replica that has
--   missed the last epoch cannot assign it again after a failover.

-- include ids

local found = redis.call('HMGET', KEYS[1], 'epoch', 'manifest')
local newest, own = found[1], redis.call('GET', KEYS[2])
if own then
  return stale(own, newest) or {own, 0, found[2] or ''}
end
local now = redis.call('TIME')
local epoch = string.format('%.0f', math.max(now[1] * 1000000 + now[2], tonumber(newest or 0) + 1))
redis.call('HSET', KEYS[1], 'epoch', epoch)
redis.call('SET', KEYS[2], epoch, 'EX', ARGV[1])
return {epoch, 1, found[2] or ''}
