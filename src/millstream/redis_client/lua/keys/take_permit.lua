#!lua
-- Take a permit to run the first message of a key queue, within the limit of its handler; or learn how long it waits.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the epoch   2 name of the key queue   3 value of the limit's field   4 most messages at once ('' = any)
--       5 milliseconds that the message takes of the rate ('' = no rate)   6 milliseconds of the longest message of the rate
--       7 holder of the permit: the lease token of a worker, or a name that a task has chosen; a space; the message's id
--       8 '1' if the permit ends with the lease of the queue, else ''   9 milliseconds after which no run is left
-- REPLY 0 if the message may run; else the milliseconds after which the key queue may ask again
-- ERROR STALE when a newer run has taken over
--
-- INVARIANTS  At most so many permits of a value are held at once, and messages of a value begin as far apart as the
--   rate demands (the generic cell rate algorithm, ITU-T I.371): an execution that asks too early, or that takes the place
--   of another one, is refused. Waiting only orders those that are refused, and times their next question. A call that is
--   repeated takes one permit; of the rate it may take twice as much.

-- include ids
-- include key_queues
-- include limits

local refusal = stale(ARGV[1], redis.call('HGET', KEYS[1], 'epoch'))
if refusal then return refusal end

local name, value, at_once, holder = ARGV[2], ARGV[3], ARGV[4], ARGV[7]
local takes_ms, hold_ms = tonumber(ARGV[5]), tonumber(ARGV[9])
local limited, permits = limited_by(value), permits_of(value)
if redis.call('HEXISTS', permits, holder) == 1 then return 0 end

local now = precise_now_ms()
local free_at = takes_ms and tonumber(redis.call('GET', free_at_of(value)) or 0) or 0
if free_at > now + tonumber(ARGV[6]) then free_at = now end -- the clock went back, or the rate was lower before

local at_once_free = free_permits(value, at_once, now)
local free = free_at > now and 0 or at_once_free
if takes_ms then free = math.min(free, 1) end
if not redis.call('ZSCORE', limited, name) then free = free - expected(value, now, now) end

if free >= 1 then
  redis.call('ZREM', limited, name)
  if at_once ~= '' then
    redis.call('HSET', permits, holder, ARGV[8] == '1' and name or string.format('t%.0f', now + hold_ms))
    redis.call('PEXPIRE', permits, string.format('%.0f', hold_ms))
  end
  if takes_ms and takes_ms > 0 then
    local at = now + takes_ms
    redis.call('SET', free_at_of(value), string.format('%.3f', at), 'PX', string.format('%.0f', math.ceil(takes_ms)))
  end
  return 0
end

redis.call('ZREM', limited, name)
redis.call('ZREMRANGEBYSCORE', limited, '-inf', now - STALE_MS)
local last = tonumber(redis.call('ZRANGE', limited, -1, -1, 'WITHSCORES')[2] or 0)
local due = now + 1
if takes_ms then due = math.max(due, free_at, last + takes_ms) end
-- A permit that is returned wakes the first that wait. These times are for those that a dead worker does not return.
if at_once_free < 1 then due = math.max(due, now + POLL_MS, last + STAGGER_MS) end
due = math.ceil(math.min(due, now + LONGEST_WAIT_MS))
redis.call('ZADD', limited, due, name)
redis.call('PEXPIRE', limited, STALE_MS)
return math.ceil(due - now)
