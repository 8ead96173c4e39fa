#!lua flags=allow-oom
-- Return a permit, and wake the key queues that have waited longest for one.
--
-- KEYS  as in commit.lua
-- ARGV  1 value of the limit's field   2 most messages at once   3 holder of the permit
-- REPLY how many key queues were woken
--
-- INVARIANT  A key queue that waits is woken as often as a permit is free for it. One that is not backing off yet, since
--   its refusal is under way, finds the new time when it begins to (`due_of_limited`).

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

local woken, ready = redis.call('ZRANGEBYSCORE', limited, '(' .. string.format('%.0f', due), '+inf', 'LIMIT', 0, free), 0
for _, name in ipairs(woken) do
  redis.call('ZADD', limited, due, name)
  if redis.call('ZSCORE', BACKOFF, name) then
    if due > now + 1 then
      redis.call('ZADD', BACKOFF, due, name)
    else
      redis.call('ZREM', BACKOFF, name)
      if make_ready(name) then ready = ready + 1 end
    end
  end
end
notify_idle(ready)
return #woken
