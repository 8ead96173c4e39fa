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
local MOST_WOKEN, PASSED_AT_ONCE = 16, 1000

local function line_of(name)
  return BASE .. name .. ':line'
end

-- What is known against an entry: deaths, failed attempts, leases that ran out, and who runs it in isolation.
local function forget_strikes(id)
  redis.call('HDEL', KEYS[4], id, id .. 'f', id .. 'l', id .. 'a')
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
  for i = 1, #ids, PASSED_AT_ONCE do
    local last = math.min(i + PASSED_AT_ONCE - 1, #ids)
    local claim = {KEYS[7], group, consumer, 0, unpack(ids, i, last)}
    claim[#claim + 1] = 'FORCE'
    claim[#claim + 1] = 'JUSTID'
    redis.call('XCLAIM', unpack(claim))
  end
end

-- End leases, with one command for many. The lines must be put elsewhere by the caller, unless they have nothing left.
local function end_leases(names)
  for i = 1, #names, PASSED_AT_ONCE do
    local last = math.min(i + PASSED_AT_ONCE - 1, #names)
    redis.call('HDEL', OWNERS, unpack(names, i, last))
    redis.call('ZREM', LEASES, unpack(names, i, last))
  end
end

-- Have nobody work on the first entries of a line any more.
local function let_go(group, name, claimed)
  if claimed > 0 then hold_by(group, WAITING, redis.call('LRANGE', line_of(name), 0, claimed - 1)) end
end

local function end_lease(group, name, claimed)
  end_leases({name})
  let_go(group, name, claimed)
end

-- Put a line that has no lease where it belongs; `first` before the others. True if it can be taken now.
local function line_up(name, first)
  if redis.call('EXISTS', line_of(name)) == 0 or redis.call('HEXISTS', PARKED, name) == 1 then return false end
  if first then redis.call('LPUSH', READY, name) else redis.call('RPUSH', READY, name) end
  return true
end

-- Whether there is any line, or may be at once, where no worker has one: on Spark.
local function some_lines()
  return redis.call('EXISTS', PARKED, READY, BACKOFF) > 0
end

-- Whether what comes of a key has to wait: it is parked, or others of it wait already.
local function is_aside(name)
  return redis.call('HEXISTS', PARKED, name) == 1 or redis.call('EXISTS', line_of(name)) == 1
end

-- A line that Spark runs stays ready until its last entry has left it. It is among the first that are.
local function drop_empty(name)
  if redis.call('EXISTS', line_of(name)) == 0 then redis.call('LREM', READY, 1, name) end
end

-- Whether a line is leased under this token, which `take` gave out.
local function holds(name, token)
  return redis.call('HGET', OWNERS, name) == token
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

-- An error if lines have entries that a handler without a key cannot take over: those that are parked, and those that
-- wait on Spark for the ones before them. What workers have in lines becomes open again.
local function needs_keys(engine)
  local count = 0
  for _, name in ipairs(engine == 'keyed' and redis.call('HKEYS', PARKED) or all_lines()) do
    if string.sub(name, 1, 1) == 'k' or redis.call('HEXISTS', PARKED, name) == 1 then
      count = count + redis.call('EXISTS', line_of(name))
    end
  end
  if count > 0 then return redis.error_reply('PARKED ' .. count) end
end

-- Forget the lines that no person has parked, and the others as well unless they are kept.
local function forget_lines(keep_parked)
  for _, name in ipairs(all_lines()) do
    if not (keep_parked and redis.call('HEXISTS', PARKED, name) == 1) then redis.call('UNLINK', line_of(name)) end
  end
  redis.call('UNLINK', OWNERS, LEASES, READY, BACKOFF, WAKE)
  if not keep_parked then redis.call('UNLINK', PARKED) end
end
