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
--   rate demands (the generic cell rate algorithm, ITU-T I.371; its tolerance is CATCH_UP_MS, for those that waited): an
--   execution that asks too early, or that takes the place of another one, is refused. Waiting only orders those that
--   are refused, and times their next question. A call that is repeated takes one permit, which then lasts as
--   long as a new one; of the rate it may take twice as much.

-- include ids
-- include key_queues
-- include limits

local refusal = stale(ARGV[1], redis.call('HGET', KEYS[1], 'epoch'))
if refusal then return refusal end

local name, value, at_once, holder = ARGV[2], ARGV[3], ARGV[4], ARGV[7]
local takes_ms, hold_ms = tonumber(ARGV[5]), tonumber(ARGV[9])
local limited, permits = limited_by(value), permits_of(value)

-- Let a key last for so many milliseconds, or longer: another message may need it for longer.
local function keep(key, ms)
  local left_ms = redis.call('PTTL', key)
  if left_ms < ms then redis.call('PEXPIRE', key, string.format('%.0f', ms)) end
end

local now, rate = precise_now_ms(), rate_of(value)

local function hold()
  redis.call('HSET', permits, holder, ARGV[8] == '1' and name or string.format('t%.0f', now + hold_ms))
  keep(permits, hold_ms)
end

local held = redis.call('HGET', permits, holder)
if held and not is_over(holder, held, now) then
  hold() -- the run may begin only now
  return 0
elseif held then
  redis.call('HDEL', permits, holder)
end

local waited = redis.call('ZSCORE', limited, name)
local queue = waited and 'again' or 'tail'
local free_at, last_takes_ms, behind = 0, 0, 0
if takes_ms then
  local found = redis.call('HMGET', rate, 'at', 'takes', queue)
  free_at, last_takes_ms, behind = tonumber(found[1] or 0), tonumber(found[2] or 0), tonumber(found[3] or 0)
  -- The clock went back, or the rate was lower before.
  if free_at > now + math.min(last_takes_ms, tonumber(ARGV[6])) then free_at = now end
end

local function store_rate(until_ms, ...)
  redis.call('HSET', rate, ...)
  keep(rate, math.ceil(until_ms - now) + CATCH_UP_MS)
end

local at_once_free = free_permits(value, at_once, now)
local free = free_at > now and 0 or at_once_free
if takes_ms then free = math.min(free, 1) end
if not waited then free = free - expected(value, now, now) end
redis.call('ZREM', limited, name)

if free >= 1 then
  if at_once ~= '' then hold() end
  if takes_ms and takes_ms > 0 then
    -- A key that waited asks a little late. The rate does not lose that time.
    local at = math.max(free_at, waited and now - CATCH_UP_MS or now) + takes_ms
    store_rate(at, 'at', string.format('%.3f', at), 'takes', string.format('%.3f', takes_ms))
  end
  return 0
end

redis.call('ZREMRANGEBYSCORE', limited, '-inf', now - STALE_MS)
local last = tonumber(redis.call('ZRANGE', limited, -1, -1, 'WITHSCORES')[2] or 0)
local due = now + 1
if takes_ms then due = math.max(due, free_at, last > 0 and behind or 0) end
-- A permit that is returned wakes the first that wait. These times are for those that a dead worker does not return.
if at_once_free < 1 then due = math.max(due, now + POLL_MS, last + STAGGER_MS) end
-- Beyond the longest wait they do not all ask at once, either. No time is much further: the clock may have gone back.
local latest = math.max(now + LONGEST_WAIT_MS, last + STAGGER_MS)
due = math.min(due, latest, now + LONGEST_WAIT_MS + 2 * redis.call('ZCARD', limited) * STAGGER_MS)
-- The next one waits for what this one takes. One that has waited comes before those that ask for the first time.
if takes_ms then store_rate(due + takes_ms, queue, string.format('%.3f', due + takes_ms)) end
due = math.ceil(due)
redis.call('ZADD', limited, due, name)
keep(limited, due - now + STALE_MS)
return math.ceil(due - now)
