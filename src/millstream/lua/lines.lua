-- The lines of a handler's keys: which entries wait for their key's turn, and who has it. KEYS as of commit.lua.
--
-- A line is named as marks are: 'k' and the key, or 'i' and the id of an entry without a key, which has a line to itself.
-- It is a list of ids in stream order, of entries that were routed and are not committed; it is kept only while it has
-- any. Each line that has is in exactly one of: ready (list), leases (sorted set, deadline in ms; owners has its holder),
-- backoff (sorted set, due in ms), parked (hash, the reason); but that a leased one may be parked as well, for when its
-- lease ends.
local BASE = string.sub(KEYS[1], 1, -5) -- without 'meta'
local OWNERS, LEASES, READY = BASE .. 'owners', BASE .. 'leases', BASE .. 'ready'
local BACKOFF, PARKED, WAKE = BASE .. 'backoff', BASE .. 'parked', BASE .. 'wake'
local WAITING = 'waiting' -- the consumer whose entries nobody works on
local MOST_WOKEN, CLAIMED_AT_ONCE = 16, 1000

local function line_of(name)
  return BASE .. name .. ':line'
end

local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

-- Have so many workers that wait look for lines. One that takes its fill and leaves some wakes the next.
local function wake(count)
  if count == 0 then return end
  local asleep = MOST_WOKEN - redis.call('LLEN', WAKE)
  for _ = 1, math.min(count, asleep) do redis.call('RPUSH', WAKE, '1') end
end

-- Give the first entries of a line to `consumer` in the pending list, where any tool can see who has them.
local function hold_by(group, consumer, ids)
  for i = 1, #ids, CLAIMED_AT_ONCE do
    local last = math.min(i + CLAIMED_AT_ONCE - 1, #ids)
    local claim = {KEYS[7], group, consumer, 0, unpack(ids, i, last)}
    claim[#claim + 1] = 'FORCE'
    claim[#claim + 1] = 'JUSTID'
    redis.call('XCLAIM', unpack(claim))
  end
end

-- End a lease. The line must be put elsewhere by the caller, unless it has nothing left.
local function end_lease(group, name, claimed)
  redis.call('HDEL', OWNERS, name)
  redis.call('ZREM', LEASES, name)
  if claimed > 0 then
    hold_by(group, WAITING, redis.call('LRANGE', line_of(name), 0, claimed - 1))
  end
end

-- Put a line that has no lease where it belongs; `first` before the others. True if it can be taken now.
local function line_up(name, first)
  if redis.call('EXISTS', line_of(name)) == 0 or redis.call('HEXISTS', PARKED, name) == 1 then return false end
  if first then redis.call('LPUSH', READY, name) else redis.call('RPUSH', READY, name) end
  return true
end

-- Whether a line is leased under this token, which `take` gave out.
local function holds(name, token)
  return redis.call('HGET', OWNERS, name) == token
end

-- An error if people have parked lines that have entries.
local function parked_lines()
  local count = 0
  for _, name in ipairs(redis.call('HKEYS', PARKED)) do count = count + redis.call('EXISTS', line_of(name)) end
  if count > 0 then return redis.error_reply('PARKED ' .. count) end
end

local function count_parked()
  local count = 0
  for _, name in ipairs(redis.call('HKEYS', PARKED)) do count = count + redis.call('LLEN', line_of(name)) end
  return count
end

-- All lines that have entries.
local function all_lines()
  local names = redis.call('LRANGE', READY, 0, -1)
  local owned, parked = redis.call('HKEYS', OWNERS), redis.call('HKEYS', PARKED)
  local backing_off = redis.call('ZRANGE', BACKOFF, 0, -1)
  for _, more in ipairs({owned, backing_off, parked}) do
    for _, name in ipairs(more) do names[#names + 1] = name end
  end
  return names
end

-- Make all that is in lines pending, with nobody.
local function hold_lines(group)
  for _, name in ipairs(all_lines()) do hold_by(group, WAITING, redis.call('LRANGE', line_of(name), 0, -1)) end
end

local function forget_lines()
  for _, name in ipairs(all_lines()) do redis.call('UNLINK', line_of(name)) end
  redis.call('UNLINK', OWNERS, LEASES, READY, BACKOFF, PARKED, WAKE)
end
