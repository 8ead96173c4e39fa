#!lua flags=allow-oom
-- Return a permit, and wake the key queues that have waited longest for one.
--
-- KEYS  as in commit.lua
-- ARGV  1 value of the limit's field   2 most messages at once   3 holder of the permit
-- REPLY how many key queues were woken
--
-- INVARIANT  A key queue that waits is woken as often as a permit is free for it. One that is not backing off yet, since
--   its refusal is under way, finds the new time when it begins to (`due_of_limited`). One that does not wait for the limit
--   any more is woken by none, and takes no permit from those that do.

-- include key_queues
-- include limits

local value, limited = ARGV[1], limited_by(ARGV[1])
redis.call('HDEL', permits_of(value), ARGV[3])
if redis.call('EXISTS', limited) == 0 then return 0 end

local now = precise_now_ms()
local due = math.ceil(math.max(now, tonumber(redis.call('HGET', rate_of(value), 'at') or 0)))
local free = free_permits(value, ARGV[2], now)
if due > now + 1 then free = math.min(free, 1) end -- the rate lets one begin at that time
free = free - expected(value, now, due)
if free < 1 then return 0 end

local MOST_DROPPED = 1000 -- in one call
local on_workers = redis.call('HGET', KEYS[1], 'owner') == 'keyed'

-- Whether a key queue still waits for the limit from `since` on: an operator may have parked it, or skipped its message.
-- On Spark a key whose refusal is under way is in the memory of its task alone.
local function is_waiting(name, since)
  if redis.call('HEXISTS', PARKED, name) == 1 then return false end
  local backs_off_until = redis.call('ZSCORE', BACKOFF, name)
  if backs_off_until then return tonumber(backs_off_until) == since end
  return not on_workers or redis.call('HEXISTS', OWNERS, name) == 1
end

local woken, ready, dropped = 0, 0, 0

local function wake(name)
  woken = woken + 1
  redis.call('ZADD', limited, due, name)
  if not redis.call('ZSCORE', BACKOFF, name) then return end
  if due > now + 1 then
    redis.call('ZADD', BACKOFF, due, name)
  else
    redis.call('ZREM', BACKOFF, name)
    if make_ready(name) then ready = ready + 1 end
  end
end

local later = '(' .. string.format('%.0f', due)
while woken < free and dropped < MOST_DROPPED do
  local waiting = redis.call('ZRANGEBYSCORE', limited, later, '+inf', 'WITHSCORES', 'LIMIT', 0, free - woken)
  if #waiting == 0 then break end
  for i = 1, #waiting, 2 do
    if is_waiting(waiting[i], tonumber(waiting[i + 1])) then
      wake(waiting[i])
    else
      dropped = dropped + redis.call('ZREM', limited, waiting[i])
    end
  end
end
notify_idle(ready)
return woken
