-- The failed attempts on the first entry of a key queue: their number ('f'), when the first one failed ('s', Unix ms),
-- and why the last one failed ('e': the error in one line, then the traceback). KEYS as in commit.lua, `key_queues` first.
local MOST_FIELDS = 15000

local function store_failed_attempts(id, number, last_error)
  -- Where so many keys wait, most wait for the same reason: the tracebacks of all could fill the memory.
  if redis.call('HLEN', KEYS[4]) >= MOST_FIELDS then last_error = string.match(last_error, '^[^\n]*') end
  redis.call('HSET', KEYS[4], id .. 'f', number)
  redis.call('HSETNX', KEYS[4], id .. 's', now_ms())
  if last_error ~= '' then redis.call('HSET', KEYS[4], id .. 'e', last_error) end
end
