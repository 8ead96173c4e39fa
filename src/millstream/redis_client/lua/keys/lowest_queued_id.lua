#!lua flags=allow-oom
-- Return the lowest id in any key queue, so that it is not trimmed, whatever the state of the pending list.
--
-- KEYS  as in commit.lua
-- ARGV  1 most queues that are read in one call
-- REPLY the id, '' if all queues are empty; nil if there are more queues than that, or the last call is recent
--
-- INVARIANT  An entry is enqueued after all entries before it in the stream, so that the lowest only rises; except for
--   those that masters enqueue from the pending list, which has kept them so far.

-- include ids
-- include key_queues

-- Each queue costs the server some 2 us, and all workers call: together they use 2 % of its time.
local PAUSE_MS = 0.1

local most = tonumber(ARGV[1])
local count = redis.call('LLEN', READY)
count = count + redis.call('HLEN', OWNERS) + redis.call('HLEN', PARKED)
count = count + redis.call('ZCARD', BACKOFF)
if count > most then return false end
local now = now_ms()
local due = tonumber(redis.call('HGET', KEYS[1], 'trim_at') or 0)
-- A time further ahead means that the clock went back.
if now < due and due - now <= most * PAUSE_MS then return false end
redis.call('HSET', KEYS[1], 'trim_at', string.format('%.0f', now + count * PAUSE_MS))
local lowest = ''
for _, name in ipairs(all_queues()) do
  local first = redis.call('LINDEX', queue_of(name), 0)
  if first and (lowest == '' or less(first, lowest)) then lowest = first end
end
return lowest
