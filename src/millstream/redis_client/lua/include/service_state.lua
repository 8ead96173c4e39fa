-- State of a service: its streams, their owners and its consumers. KEYS  1 the input stream   2 meta (hash)
--
-- An entry of the input stream announces a stream. It is read once, and stays pending until the stream is done. From
-- then on the stream is in `streams`, and either has an owner (`owners`, and the owner's `of:` set) or is in
-- `unassigned`. `alive` holds one deadline in ms per consumer, which covers all its leases: one step renews them all.
local INPUT, META = KEYS[1], KEYS[2]
local BASE = string.sub(META, 1, -5) -- without 'meta'
local STREAMS, OWNERS, UNASSIGNED, LOSSES = BASE .. 'streams', BASE .. 'owners', BASE .. 'unassigned', BASE .. 'losses'
local ALIVE, CONSUMERS = BASE .. 'alive', BASE .. 'consumers'
local EVENTS, DEAD = BASE .. 'events', BASE .. 'dead'
-- stream -> token of its owner, and the error for which the owner excludes it; of a handler's workers only
local ERRORS = BASE .. 'errors'
local RELEASED = BASE .. 'released' -- stream -> the last token under which its owner released it
local NO_OWNER = 'unassigned' -- the consumer of the group that has the announcements without an owner
local MOST_EVENTS = 10000

local function streams_of(consumer)
  return BASE .. 'of:' .. consumer
end

local function now_us()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

-- Record an event, for operators. It also wakes every consumer that waits.
local function emit(how, stream, consumer)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', MOST_EVENTS, '*', 'event', how, 'stream', stream, 'consumer', consumer)
end

local function make_group(group)
  local made = redis.pcall('XGROUP', 'CREATE', INPUT, group, '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
    return redis.error_reply(made.err .. ' (XGROUP CREATE)')
  end
end

-- Show the owner of a stream in the pending list, where any tool can see it. Nothing else depends on that.
local function show_owner(group, consumer, id)
  redis.pcall('XCLAIM', INPUT, group, consumer, 0, id or '', 'FORCE', 'JUSTID')
end

local function owner_of(stream)
  local token, consumer = string.match(redis.call('HGET', OWNERS, stream) or '', '^(%d+) (.*)$')
  return consumer, token
end

local function remove_owner(stream, consumer)
  redis.call('HDEL', OWNERS, stream)
  redis.call('HDEL', ERRORS, stream)
  redis.call('SREM', streams_of(consumer), stream)
end

-- Whether the lease ended by a loss of its owner. It did not if the stream was 'released', if the time to release it
-- ran out ('overran'), or if Redis was unavailable ('lapsed').
local function is_loss(how)
  return how == 'expired' or how == 'stuck'
end

-- End a lease; the stream is assigned again before new ones.
local function release(group, stream, consumer, how)
  remove_owner(stream, consumer)
  redis.call('LPUSH', UNASSIGNED, stream)
  show_owner(group, NO_OWNER, redis.call('HGET', STREAMS, stream))
  if how == 'released' then
    redis.call('HDEL', LOSSES, stream)
  elseif is_loss(how) then
    redis.call('HINCRBY', LOSSES, stream, 1)
  end
  emit(how, stream, consumer)
end

-- Evict a consumer, and release its streams, at most so many at once. Returns how many streams are left.
local function evict(group, consumer, how, most)
  redis.call('HDEL', CONSUMERS, consumer)
  local streams = redis.call('SRANDMEMBER', streams_of(consumer), most)
  for _, stream in ipairs(streams) do release(group, stream, consumer, how) end
  local left = redis.call('SCARD', streams_of(consumer))
  if left == 0 then
    redis.call('ZREM', ALIVE, consumer)
    local pending = redis.pcall('XPENDING', INPUT, group, '-', '+', 1, consumer)
    if not pending.err and #pending == 0 then redis.pcall('XGROUP', 'DELCONSUMER', INPUT, group, consumer) end
  end
  return left
end

local function delete_announcement(group, id)
  redis.call('XACK', INPUT, group, id)
  redis.call('XDEL', INPUT, id)
end

-- Remove a stream that is done, or a dead letter.
local function forget_stream(group, stream)
  local id = redis.call('HGET', STREAMS, stream)
  redis.call('HDEL', STREAMS, stream)
  redis.call('HDEL', LOSSES, stream)
  redis.call('HDEL', RELEASED, stream)
  if id then delete_announcement(group, id) end
end

local function describe(id)
  local entry = id and redis.call('XRANGE', INPUT, id, id)[1]
  return entry and entry[2] or {}
end

-- A lease, as in replies.
local function lease_on(stream, token)
  local id = redis.call('HGET', STREAMS, stream)
  return {stream, token, id or '', describe(id), tonumber(redis.call('HGET', LOSSES, stream) or 0)}
end

-- Assign a stream to a consumer, under a token greater than all before, even if a failover lost the last ones.
local function assign(group, stream, consumer)
  local fence = redis.call('HGET', META, 'fence')
  local token = now_us()
  if fence and tonumber(fence) >= token then token = tonumber(fence) + 1 end
  local text = string.format('%.0f', token)
  redis.call('HSET', META, 'fence', text)
  redis.call('HSET', OWNERS, stream, text .. ' ' .. consumer)
  redis.call('SADD', streams_of(consumer), stream)
  show_owner(group, consumer, redis.call('HGET', STREAMS, stream))
  return lease_on(stream, text)
end

-- Whether the consumer is registered under this incarnation.
local function is_registered(consumer, incarnation)
  local known = redis.call('HGET', CONSUMERS, consumer)
  return known and string.match(known, '^%S+') == incarnation
end
