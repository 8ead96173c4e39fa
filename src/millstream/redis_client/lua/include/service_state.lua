-- The streams that a service's consumers share, and their owners. KEYS  1 the input stream   2 meta (hash)
--
-- An entry of the input stream announces a stream. It is read once, and stays pending until the stream is done. From
-- then on the stream is in `streams`, and either has an owner (`owners`, and the owner's `of:` set) or is in `free`. An
-- owner's leases last as long as it is alive (sorted set, deadline in ms), so one step renews them all.
local INPUT, META = KEYS[1], KEYS[2]
local BASE = string.sub(META, 1, -5) -- without 'meta'
local STREAMS, OWNERS, FREE, FALLS = BASE .. 'streams', BASE .. 'owners', BASE .. 'free', BASE .. 'falls'
local ALIVE, CONSUMERS = BASE .. 'alive', BASE .. 'consumers'
local EVENTS, DEAD = BASE .. 'events', BASE .. 'dead'
local TROUBLES = BASE .. 'troubles' -- stream -> token of its owner, and the error; for a handler's workers only
local RETURNED = BASE .. 'returned' -- stream -> the last token under which its owner released it
local WAITING = 'waiting' -- the consumer of the announcements without an owner
local KEPT_EVENTS = 10000

local function set_of(consumer)
  return BASE .. 'of:' .. consumer
end

local function now_us()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

-- Adds an event, which wakes every consumer that waits.
local function tell(what, stream, consumer)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', KEPT_EVENTS, '*', 'event', what, 'stream', stream, 'consumer', consumer)
end

local function make_group(group)
  local made = redis.pcall('XGROUP', 'CREATE', INPUT, group, '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
    return redis.error_reply(made.err .. ' (XGROUP CREATE)')
  end
end

-- Show in the pending list, where any tool can see it, who has an announcement. Nothing else depends on it.
local function hold_by(group, consumer, id)
  redis.pcall('XCLAIM', INPUT, group, consumer, 0, id or '', 'FORCE', 'JUSTID')
end

local function owner_of(stream)
  local token, consumer = string.match(redis.call('HGET', OWNERS, stream) or '', '^(%d+) (.*)$')
  return consumer, token
end

local function let_go(stream, consumer)
  redis.call('HDEL', OWNERS, stream)
  redis.call('HDEL', TROUBLES, stream)
  redis.call('SREM', set_of(consumer), stream)
end

-- Whether the owner of a stream was lost. Otherwise it 'released' the stream, or is not to blame: its revocation timed
-- out, or Redis was away.
local function is_loss(what)
  return what == 'expired' or what == 'stuck'
end

-- End a lease so that another consumer may have the stream, before those that wait for their first owner.
local function free(group, stream, consumer, what)
  let_go(stream, consumer)
  redis.call('LPUSH', FREE, stream)
  hold_by(group, WAITING, redis.call('HGET', STREAMS, stream))
  if what == 'released' then
    redis.call('HDEL', FALLS, stream)
  elseif is_loss(what) then
    redis.call('HINCRBY', FALLS, stream, 1)
  end
  tell(what, stream, consumer)
end

-- Evict a consumer and unassign its streams, at most so many at once. Returns how many streams it still has.
local function bury(group, consumer, what, most)
  redis.call('HDEL', CONSUMERS, consumer)
  local streams = redis.call('SRANDMEMBER', set_of(consumer), most)
  for _, stream in ipairs(streams) do free(group, stream, consumer, what) end
  local left = redis.call('SCARD', set_of(consumer))
  if left == 0 then
    redis.call('ZREM', ALIVE, consumer)
    local pending = redis.pcall('XPENDING', INPUT, group, '-', '+', 1, consumer)
    if not pending.err and #pending == 0 then redis.pcall('XGROUP', 'DELCONSUMER', INPUT, group, consumer) end
  end
  return left
end

-- Remove an announcement.
local function drop(group, id)
  redis.call('XACK', INPUT, group, id)
  redis.call('XDEL', INPUT, id)
end

-- Remove a stream that is done, or dead-lettered.
local function strike_off(group, stream)
  local id = redis.call('HGET', STREAMS, stream)
  redis.call('HDEL', STREAMS, stream)
  redis.call('HDEL', FALLS, stream)
  redis.call('HDEL', RETURNED, stream)
  if id then drop(group, id) end
end

local function describe(id)
  local entry = id and redis.call('XRANGE', INPUT, id, id)[1]
  return entry and entry[2] or {}
end

-- A lease in the form of a reply.
local function lease_on(stream, token)
  local id = redis.call('HGET', STREAMS, stream)
  return {stream, token, id or '', describe(id), tonumber(redis.call('HGET', FALLS, stream) or 0)}
end

-- Assign a stream to a consumer, under a token greater than all before, even if a failover has lost the last ones.
local function give(group, stream, consumer)
  local fence = redis.call('HGET', META, 'fence')
  local token = now_us()
  if fence and tonumber(fence) >= token then token = tonumber(fence) + 1 end
  local text = string.format('%.0f', token)
  redis.call('HSET', META, 'fence', text)
  redis.call('HSET', OWNERS, stream, text .. ' ' .. consumer)
  redis.call('SADD', set_of(consumer), stream)
  hold_by(group, consumer, redis.call('HGET', STREAMS, stream))
  return lease_on(stream, text)
end

-- Whether this is the living consumer of the name.
local function is_alive(consumer, incarnation)
  local known = redis.call('HGET', CONSUMERS, consumer)
  return known and string.match(known, '^%S+') == incarnation
end
