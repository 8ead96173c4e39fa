#!lua flags=allow-oom
-- Heartbeat of a consumer: renew its leases, evict expired consumers, lease a fair share of the streams, and return how
-- many streams it must release.
--
-- KEYS  1 the input stream   2 meta (hash)
-- ARGV  1 consumer group   2 consumer   3 its incarnation   4 lease in milliseconds   5 weight
--       6 most streams (0 = any)   7 most streams to lease now   8 '1' if streams released by others may be among them
--       9 how many it is releasing   10 '1' to return all its leases   11 period of moves in milliseconds
--       12 the streams that may move in a period, as a fraction (0 = none)
--       13 owner losses after which a stream is a dead letter (0 = any number)
--       14 '1' if the previous process of this name is known to be dead
--       15.. of each lease not to be renewed: stream, token, and why: 'stuck', or 'overran' the time to release it
-- REPLY 'HELD' and milliseconds, while another process has the consumer's name; or: 'OK', when the state of the service
--       was created, whether the consumer was evicted or is new, milliseconds until the next consumer may expire (-1 =
--       there is no other), streams in all, streams that it owns, its share, how many of them to release now, whether
--       there is more to lease at once, newest ids of the input stream and of events, how many streams lost an owner,
--       milliseconds since the first of their leases expired (-1 = none had expired), new leases (stream, token, id and
--       items of the announcement, owner losses), unassigned streams (if it may not lease them), and all its leases if
--       requested
-- ERROR NOPERM, WRONGTYPE when a step would be refused one of its writes
--
-- INVARIANTS  A stream has one owner at a time by the server's clock, each under a token of its own that is greater
--   than all before. No consumer is evicted because Redis itself, or every consumer, was unavailable. Malformed
--   announcements are dead letters. However many of them there are, or are announced twice, or are given up, one call
--   processes a thousand.

-- include service_state
-- include acl_probe

local group, consumer, incarnation, lease_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local weight, limit, most = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local recovers, leaving, wants_all = ARGV[8] == '1', tonumber(ARGV[9]), ARGV[10] == '1'
local period_ms, fraction, max_losses = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local replaces = ARGV[14] == '1'
local AT_ONCE, FURTHEST_MS, MOST_ITEMS, LEAST_MOVES = 1000, 600000, 1000, 10
local FIELD = 'lbs-input'

local us = now_us()
local ms = math.floor(us / 1000)
local problem = make_group(group)
if problem then return problem end

-- A step that fails midway would lose a stream, so the causes of failure are checked before.
local function wrong_type()
  local wrong
  local function check(wanted, key, reply)
    local text = type(reply) == 'table' and reply.err
    if text and string.find(text, 'WRONGTYPE', 1, true) then
      wrong = redis.error_reply('WRONGTYPE ' .. key .. ' holds a value that is no ' .. wanted)
    end
  end
  for _, key in ipairs({META, STREAMS, OWNERS, LOSSES, RELEASED, ERRORS, CONSUMERS}) do
    check('hash', key, redis.pcall('HLEN', key))
  end
  for _, key in ipairs({EVENTS, DEAD}) do check('stream', key, redis.pcall('XLEN', key)) end
  check('list', UNASSIGNED, redis.pcall('LLEN', UNASSIGNED))
  check('sorted set', ALIVE, redis.pcall('ZSCORE', ALIVE, ''))
  check('set', streams_of(consumer), redis.pcall('SCARD', streams_of(consumer)))
  return wrong
end

-- These probes change nothing.
local function missing_rights()
  return may_write_hash(META) or may_write_stream(EVENTS) or may('LPUSH', INPUT, '') or may('SADD', INPUT, '')
    or may('SREM', INPUT, '') or may('ZREM', INPUT, '') or may('XACK', INPUT, group, '0-0') or may('XDEL', INPUT, '0-0')
    or may('XCLAIM', INPUT, group, consumer, 0, '') or may('XPENDING', INPUT, group)
    or may('XGROUP', 'DELCONSUMER', INPUT, '', '')
end

-- Identity
local refusal = wrong_type()
if refusal then return refusal end
local is_new = not is_registered(consumer, incarnation)
refusal = is_new and missing_rights()
if refusal then return refusal end
if is_new and redis.call('HEXISTS', CONSUMERS, consumer) == 1 then
  local left = tonumber(redis.call('ZSCORE', ALIVE, consumer) or 0) - ms
  if left > 0 and not replaces then return {'HELD', left} end
end
-- Leases under its name are of an earlier process, which may still count on them.
local lost, late_ms = 0, -1
local function count_lost(until_ms, count)
  if count > 0 then
    lost = lost + count
    late_ms = math.max(late_ms, ms - until_ms)
  end
end
if is_new then
  local count = redis.call('SCARD', streams_of(consumer))
  local until_ms = tonumber(redis.call('ZSCORE', ALIVE, consumer) or ms)
  evict(group, consumer, 'expired', count)
  count_lost(until_ms, count)
end

-- Time: without a heartbeat of any consumer for long, Redis was unavailable, and every consumer gets one more lease. A
-- clock that went back does not keep expired consumers alive.
local last_ms = tonumber(redis.call('HGET', META, 'heartbeat') or ms)
local was_unavailable = ms - last_ms > lease_ms / 2
for _, name in ipairs(redis.call('ZRANGEBYSCORE', ALIVE, ms + math.max(10 * lease_ms, FURTHEST_MS), '+inf')) do
  redis.call('ZADD', ALIVE, ms + lease_ms, name)
end
if was_unavailable then
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', ALIVE, '-inf', ms + lease_ms)) do
    redis.call('ZADD', ALIVE, ms + lease_ms, name)
  end
end
redis.call('HSET', META, 'heartbeat', ms)
if redis.call('HSETNX', META, 'created', string.format('%.0f', us)) == 1 then
  redis.call('XGROUP', 'SETID', INPUT, group, '0') -- the state is lost: read all announcements again
end
redis.call('ZADD', ALIVE, ms + lease_ms, consumer)
redis.call('HSET', CONSUMERS, consumer, incarnation .. ' ' .. weight .. ' ' .. limit)

-- Streams that lost their owner
local more = false
local expired = redis.call('ZRANGEBYSCORE', ALIVE, '-inf', ms, 'WITHSCORES')
for i = 1, #expired, 2 do
  local before = redis.call('SCARD', streams_of(expired[i]))
  local left = evict(group, expired[i], 'expired', AT_ONCE)
  count_lost(tonumber(expired[i + 1]), before - left)
  more = more or left > 0
end
for i = 15, #ARGV, 3 do
  local stream, its_token, why = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local owner, token = owner_of(stream)
  if owner == consumer and token == its_token then
    release(group, stream, consumer, why)
    if is_loss(why) then lost = lost + 1 end
  end
end

-- Shares
local function fact(facts, name)
  for i = 1, #facts, 2 do
    if facts[i] == name then return facts[i + 1] end
  end
end

local function has_unread()
  for _, facts in ipairs(redis.call('XINFO', 'GROUPS', INPUT)) do
    if fact(facts, 'name') == group then
      return #redis.call('XRANGE', INPUT, '(' .. fact(facts, 'last-delivered-id'), '+', 'COUNT', 1) > 0
    end
  end
end

-- Announcements may have been deleted, with the input stream or by hand, so their number is only a lower bound.
local announced = redis.call('HLEN', STREAMS) + (has_unread() and 1 or 0)
local total = math.max(redis.call('XLEN', INPUT), announced)

-- Its share: by weight, none above its limit; a remainder stays with its owners.
local function own_share()
  local candidates, left = {}, total
  local known = redis.call('HGETALL', CONSUMERS)
  for i = 1, #known, 2 do
    local its_weight, its_limit = string.match(known[i + 1], '^%S+ (%S+) (%S+)$')
    candidates[#candidates + 1] = {
      name = known[i], weight = tonumber(its_weight), limit = tonumber(its_limit),
      has = redis.call('SCARD', streams_of(known[i])),
    }
  end
  while true do
    local sum, below_limit, full = 0, {}, false
    for _, one in ipairs(candidates) do sum = sum + one.weight end
    local before = left
    for _, one in ipairs(candidates) do
      if one.limit > 0 and before * one.weight / sum >= one.limit then
        full, left = true, left - one.limit
        if one.name == consumer then return one.limit end
      else
        below_limit[#below_limit + 1] = one
      end
    end
    if not full then
      local rest = left
      for _, one in ipairs(candidates) do
        one.share = math.floor(left * one.weight / sum)
        rest = rest - one.share
      end
      table.sort(candidates, function(a, b)
        local more_a, more_b = a.has - a.share, b.has - b.share
        if more_a ~= more_b then return more_a > more_b end
        return a.name < b.name
      end)
      for i, one in ipairs(candidates) do
        if one.name == consumer then return one.share + (i <= rest and 1 or 0) end
      end
    end
    candidates = below_limit
  end
end

local share = own_share()
local has = redis.call('SCARD', streams_of(consumer))
local room = math.min(most, share - has, AT_ONCE)

local function dead_letter(stream, id, items, reason)
  local count = math.min(#items, MOST_ITEMS)
  redis.call('XADD', DEAD, '*', 'reason', reason, 'id', id, 'stream', stream, unpack(items, 1, count))
end

local added = {}
local steps = AT_ONCE -- bounds the entries that take no room, of which there may be any number
while recovers and room > 0 and steps > 0 do
  steps = steps - 1
  local stream = redis.call('LPOP', UNASSIGNED)
  if not stream then break end
  local losses = tonumber(redis.call('HGET', LOSSES, stream) or 0)
  if max_losses > 0 and losses >= max_losses then
    local id = redis.call('HGET', STREAMS, stream)
    dead_letter(stream, id, describe(id), 'its owner was lost ' .. losses .. ' times')
    forget_stream(group, stream)
    emit('dead letter', stream, '')
  else
    added[#added + 1] = assign(group, stream, consumer)
    room = room - 1
  end
end

local function stream_in(items)
  for i = 1, #items, 2 do
    if items[i] == FIELD then
      local ok, found = pcall(cjson.decode, items[i + 1])
      local name = ok and type(found) == 'table' and found['DataStreamName']
      if type(name) == 'string' and name ~= '' then return name end
      return nil, 'its ' .. FIELD .. ' is not a JSON object with a DataStreamName'
    end
  end
  return nil, 'it has no field ' .. FIELD
end

-- New announcements
while room > 0 and steps > 0 do
  local count = math.min(room, steps)
  local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', count, 'STREAMS', INPUT, '>')
  if not reply then break end
  steps = steps - #reply[1][2]
  for _, entry in ipairs(reply[1][2]) do
    local id, items = entry[1], entry[2]
    local stream, why = stream_in(items)
    local known = stream and redis.call('HGET', STREAMS, stream)
    if not stream then
      dead_letter('', id, items, why)
      delete_announcement(group, id)
    elseif known == id then -- the group was lost and recreated
      show_owner(group, owner_of(stream) or NO_OWNER, id)
    elseif known then -- announced twice: one stream has one owner
      delete_announcement(group, id)
    else
      redis.call('HSET', STREAMS, stream, id)
      added[#added + 1] = assign(group, stream, consumer)
      room = room - 1
    end
  end
end
has = redis.call('SCARD', streams_of(consumer))
more = more or (room > 0 and steps <= 0) or (room <= 0 and #added > 0 and has < share)

-- Streams to release: a part of the excess in each period, so that work goes on while streams move.
local excess = 0
if fraction > 0 and has - leaving > share and redis.call('LLEN', UNASSIGNED) == 0 then
  local moved = tonumber(redis.call('GET', BASE .. 'moves') or 0)
  local allowed = math.max(LEAST_MOVES, math.floor(total * fraction)) - moved
  excess = math.max(0, math.min(has - leaving - share, allowed))
  if excess > 0 then
    redis.call('INCRBY', BASE .. 'moves', excess)
    if moved == 0 then redis.call('PEXPIRE', BASE .. 'moves', period_ms) end
  end
end

local next_ms = -1
for i = 1, 2 do
  local first = redis.call('ZRANGE', ALIVE, i - 1, i - 1, 'WITHSCORES')
  if first[1] and first[1] ~= consumer then
    next_ms = math.max(0, tonumber(first[2]) - ms + 1)
    break
  end
end

local function newest(key)
  if redis.call('EXISTS', key) == 0 then return '0-0' end
  return fact(redis.call('XINFO', 'STREAM', key), 'last-generated-id')
end

local all = {}
if wants_all then
  for _, stream in ipairs(redis.call('SMEMBERS', streams_of(consumer))) do
    local _, token = owner_of(stream)
    all[#all + 1] = lease_on(stream, token)
  end
end
local unassigned = recovers and {} or redis.call('LRANGE', UNASSIGNED, 0, AT_ONCE - 1)
return {
  'OK', redis.call('HGET', META, 'created'), is_new and 1 or 0, next_ms, total, has, share, excess, more and 1 or 0,
  newest(INPUT), newest(EVENTS), lost, late_ms, added, unassigned, all,
}
