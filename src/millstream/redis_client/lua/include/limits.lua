-- The limit of a handler, counted for each value of a field of its messages. KEYS as in commit.lua, `key_queues` first.
--
-- Of each value, `permits` (hash) has the messages that run: the holder of the permit and when it ends, which is 't' and
-- Unix milliseconds, or the name of the key queue that its worker has leased; `limited` (sorted set) the key queues that
-- wait for a permit, and from when on each may ask again, in Unix milliseconds; and `free-at` (hash) from when on the
-- rate lets the next message run (`at`), how many milliseconds the last one took of it (`takes`), and when a
-- key that waits may ask after all the others: `tail`, and `again` for those that have waited. `permits-checked` (string)
-- is there for a while after all permits were checked. All of them expire, so a value that has no messages costs nothing.
-- include limited_queues
local EXPECTED_MS, STAGGER_MS, LONGEST_WAIT_MS, STALE_MS = 1000, 10, 60000, 600000
local CATCH_UP_MS = 100

local function permits_of(value)
  return BASE .. 'permits:' .. value
end

local function rate_of(value)
  return BASE .. 'free-at:' .. value
end

local function checked_of(value)
  return BASE .. 'permits-checked:' .. value
end

local function precise_now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + now[2] / 1000
end

-- Whether a permit has ended. That of a worker ends with its lease: a holder is the lease's token and the message's id.
local function is_over(holder, ends, now)
  local until_ms = string.match(ends, '^t(%d+)$')
  if until_ms then return tonumber(until_ms) <= now end
  return not holds_lease(ends, string.match(holder, '^(.*) %S+$'))
end

-- How many more messages of the value may run at once; `at_once`: '' = any number. Where all permits are taken, those that
-- have ended are removed. That reads all of them, so it comes again only after a millisecond for each of them.
local function free_permits(value, at_once, now)
  if at_once == '' then return math.huge end
  local permits = permits_of(value)
  local count = redis.call('HLEN', permits)
  local free = tonumber(at_once) - count
  if free > 0 or not redis.call('SET', checked_of(value), '1', 'NX', 'PX', count) then return free end
  local held = redis.call('HGETALL', permits)
  for i = 1, #held, 2 do
    if is_over(held[i], held[i + 1], now) then free = free + redis.call('HDEL', permits, held[i]) end
  end
  return free
end

-- How many key queues may ask by now, or at `due`, and are expected to do so: others have to leave the permits to them.
local function expected(value, now, due)
  return redis.call('ZCOUNT', limited_by(value), now - EXPECTED_MS, due)
end
