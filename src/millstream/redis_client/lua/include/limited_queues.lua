-- The key queues that were refused a permit, and from when on each may ask again; `key_queues` first.
local POLL_MS = 1000

local function limited_by(value)
  return BASE .. 'limited:' .. value
end

-- When a key queue that was refused a permit may ask again.
local function due_of_limited(value, name, now)
  return tonumber(redis.call('ZSCORE', limited_by(value), name) or now + POLL_MS)
end
