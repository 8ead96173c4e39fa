-- The failed attempts on the first entry of a key queue: their number ('f': '0' if it has only waited, for newer code or
-- for its limit), when the first one failed ('s', Unix ms), and why the last one failed, or why it waits ('e': the error
-- in one line, then the traceback). KEYS as in commit.lua, `key_queues` first.
local MOST_FIELDS = 15000

local function store_failed_attempts(id, number, last_error)
  -- Where so many keys wait, most wait for the same reason: the tracebacks of all could fill the memory.
  if redis.call('HLEN', KEYS[4]) >= MOST_FIELDS then last_error = string.match(last_error, '^[^\n]*') end
  redis.call('HSET', KEYS[4], id .. 'f', number)
  if number ~= '0' then redis.call('HSETNX', KEYS[4], id .. 's', now_ms()) end
  if last_error ~= '' then redis.call('HSET', KEYS[4], id .. 'e', last_error) end
end
