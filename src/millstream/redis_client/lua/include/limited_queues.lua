-- The key queues that were refused a permit, and from when on each may ask again; `key_queues` first.
local POLL_MS = 1000

local function limited_by(value)
  return BASE .. 'limited:' .. value
end

-- When a key queue that was refused a permit may ask again. ZADD reads the score here: a master, which has no limits and
-- releases leases by the same script, needs no right for it that it does not need anyway.
local function due_of_limited(value, name, now)
  return tonumber(redis.call('ZADD', limited_by(value), 'XX', 'INCR', 0, name) or now + POLL_MS)
end
