#!lua flags=allow-oom
-- Say which entry is the lowest that waits in a line, so that it is not trimmed whatever became of the pending list.
--
-- KEYS  as of commit.lua
-- ARGV  1 most lines that are looked at in one call
-- REPLY its id, '' if no line has any; nil where there are more lines than that, or they were looked at a moment ago
--
-- INVARIANT  An entry comes into a line after all that lie before it in the stream, so that the lowest only rises; but for
--   those that masters bring in from the pending list, which has kept them so far.

-- include ids
-- include key_queues

-- Each line costs the server some 2 us, and all workers call: together they keep it busy 2 % of the time.
local PAUSE_MS = 0.1

local most = tonumber(ARGV[1])
local count = redis.call('LLEN', READY)
count = count + redis.call('HLEN', OWNERS) + redis.call('HLEN', PARKED)
count = count + redis.call('ZCARD', BACKOFF)
if count > most then return false end
local now = now_ms()
local due = tonumber(redis.call('HGET', KEYS[1], 'trim_at') or 0)
-- What lies further ahead is of a clock that went back.
if now < due and due - now <= most * PAUSE_MS then return false end
redis.call('HSET', KEYS[1], 'trim_at', string.format('%.0f', now + count * PAUSE_MS))
local lowest = ''
for _, name in ipairs(all_lines()) do
  local first = redis.call('LINDEX', line_of(name), 0)
  if first and (lowest == '' or less(first, lowest)) then lowest = first end
end
return lowest
