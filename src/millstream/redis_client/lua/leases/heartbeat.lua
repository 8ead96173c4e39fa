#!lua flags=allow-oom
-- One round of a consumer: stay alive, bury the dead, take a fair share of the streams, learn what to give back.
--
-- KEYS  1 the input stream   2 meta (hash)
-- ARGV  1 consumer group   2 consumer   3 its incarnation   4 lease in milliseconds   5 weight   6 most streams (0 = any)
--       7 most streams to take now   8 '1' if those that others had may be among them   9 how many it is giving back
--       10 '1' to be told all it has   11 milliseconds of a round of moves   12 how many of the streams may move in a round,
--       as a fraction (0 = none)   13 times that the owner of a stream may be lost before it is given up (0 = any)
--       14 '1' if whoever has the name is known to be dead   15.. of each lease that it does not want to be renewed: stream,
--       token, and why: 'stuck', or 'overran' the time to give it back
-- REPLY 'HELD' and milliseconds, while another process has the consumer's name; or: 'OK', the birth of the service's
--       memory, whether the consumer had been buried or is new, milliseconds until another consumer may be dead (-1 =
--       there is none), streams in all, streams that it has, its share, how many of them to give back now, whether
--       there is more to do at once, newest ids of the input stream and of events, how many streams were found to have
--       lost their owner, milliseconds since the first lease of the dead ended (-1 = no stream was found with the dead),
--       what it was given (stream, token, id and items of the announcement, times its owner was lost), streams that nobody
--       has (if it may not take them), and if it asked, all that it has
-- ERROR NOPERM, WRONGTYPE when a step would be refused one of its writes
--
-- INVARIANTS  A stream has one owner at a time by the server's clock, each under a token of its own that is greater than
--   all before. Nobody is buried because Redis itself, or everybody, was away. Malformed announcements are dead letters.
--   However many of them there are, or are announced twice, or are given up, one call looks at a thousand.

-- include service_state
-- include acl_probe

local group, consumer, incarnation, lease_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local weight, limit, most = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local recovers, leaving, wants_all = ARGV[8] == '1', tonumber(ARGV[9]), ARGV[10] == '1'
local round_ms, fraction, most_falls = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local replaces = ARGV[14] == '1'
local AT_ONCE, FURTHEST_MS, MOST_ITEMS, LEAST_MOVES = 1000, 600000, 1000, 10
local FIELD = 'lbs-input'

local us = now_us()
local ms = math.floor(us / 1000)
local problem = make_group(group)
if problem then return problem end

-- A step that is broken off midway would lose a stream, so what would break it off is found out before.
local function is_unsound()
  local wrong
  local function check(wanted, key, reply)
    local text = type(reply) == 'table' and reply.err
    if text and string.find(text, 'WRONGTYPE', 1, true) then
      wrong = redis.error_reply('WRONGTYPE ' .. key .. ' holds a value that is no ' .. wanted)
    end
  end
  for _, key in ipairs({META, STREAMS, OWNERS, FALLS, RETURNED, TROUBLES, CONSUMERS}) do
    check('hash', key, redis.pcall('HLEN', key))
  end
  for _, key in ipairs({EVENTS, DEAD}) do check('stream', key, redis.pcall('XLEN', key)) end
  check('list', FREE, redis.pcall('LLEN', FREE))
  check('sorted set', ALIVE, redis.pcall('ZSCORE', ALIVE, ''))
  check('set', set_of(consumer), redis.pcall('SCARD', set_of(consumer)))
  return wrong
end

-- What is asked here of the wrong type changes nothing.
local function may_serve()
  return may_write_hash(META) or may_write_stream(EVENTS) or may('LPUSH', INPUT, '') or may('SADD', INPUT, '')
    or may('SREM', INPUT, '') or may('ZREM', INPUT, '') or may('XACK', INPUT, group, '0-0') or may('XDEL', INPUT, '0-0')
    or may('XCLAIM', INPUT, group, consumer, 0, '') or may('XPENDING', INPUT, group)
    or may('XGROUP', 'DELCONSUMER', INPUT, '', '')
end

-- Who it is
local refusal = is_unsound()
if refusal then return refusal end
local is_new = not is_alive(consumer, incarnation)
refusal = is_new and may_serve()
if refusal then return refusal end
if is_new and redis.call('HEXISTS', CONSUMERS, consumer) == 1 then
  local left = tonumber(redis.call('ZSCORE', ALIVE, consumer) or 0) - ms
  if left > 0 and not replaces then return {'HELD', left} end
end
-- Whatever is under its name was of an earlier life, which may still believe in it.
local found_lost, late_ms = 0, -1
local function found_dead(until_ms, count)
  if count > 0 then
    found_lost = found_lost + count
    late_ms = math.max(late_ms, ms - until_ms)
  end
end
if is_new then
  local count = redis.call('SCARD', set_of(consumer))
  local until_ms = tonumber(redis.call('ZSCORE', ALIVE, consumer) or ms)
  bury(group, consumer, 'expired', count)
  found_dead(until_ms, count)
end

-- Time: if nobody was heard for long, Redis was away, and everybody gets a lease more. Nor does a clock that went back
-- keep the dead alive.
local pulse = tonumber(redis.call('HGET', META, 'pulse') or ms)
local was_away = ms - pulse > lease_ms / 2
for _, name in ipairs(redis.call('ZRANGEBYSCORE', ALIVE, ms + math.max(10 * lease_ms, FURTHEST_MS), '+inf')) do
  redis.call('ZADD', ALIVE, ms + lease_ms, name)
end
if was_away then
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', ALIVE, '-inf', ms + lease_ms)) do
    redis.call('ZADD', ALIVE, ms + lease_ms, name)
  end
end
redis.call('HSET', META, 'pulse', ms)
if redis.call('HSETNX', META, 'born', string.format('%.0f', us)) == 1 then
  redis.call('XGROUP', 'SETID', INPUT, group, '0') -- what was read before is not known any more
end
redis.call('ZADD', ALIVE, ms + lease_ms, consumer)
redis.call('HSET', CONSUMERS, consumer, incarnation .. ' ' .. weight .. ' ' .. limit)

-- What has lost its owner
local more = false
local dead = redis.call('ZRANGEBYSCORE', ALIVE, '-inf', ms, 'WITHSCORES')
for i = 1, #dead, 2 do
  local before = redis.call('SCARD', set_of(dead[i]))
  local left = bury(group, dead[i], 'expired', AT_ONCE)
  found_dead(tonumber(dead[i + 1]), before - left)
  more = more or left > 0
end
for i = 15, #ARGV, 3 do
  local stream, its_token, why = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local owner, token = owner_of(stream)
  if owner == consumer and token == its_token then
    free(group, stream, consumer, why)
    if is_loss(why) then found_lost = found_lost + 1 end
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

-- Announcements may have been deleted, with the input stream or by hand, so their number is no more than a hint.
local announced = redis.call('HLEN', STREAMS) + (has_unread() and 1 or 0)
local total = math.max(redis.call('XLEN', INPUT), announced)

-- By weight, none above its limit; a stream that cannot be split stays with who has it.
local function share_of_mine()
  local open, left = {}, total
  local known = redis.call('HGETALL', CONSUMERS)
  for i = 1, #known, 2 do
    local its_weight, its_limit = string.match(known[i + 1], '^%S+ (%S+) (%S+)$')
    open[#open + 1] = {
      name = known[i], weight = tonumber(its_weight), limit = tonumber(its_limit),
      has = redis.call('SCARD', set_of(known[i])),
    }
  end
  while true do
    local sum, still, full = 0, {}, false
    for _, one in ipairs(open) do sum = sum + one.weight end
    local before = left
    for _, one in ipairs(open) do
      if one.limit > 0 and before * one.weight / sum >= one.limit then
        full, left = true, left - one.limit
        if one.name == consumer then return one.limit end
      else
        still[#still + 1] = one
      end
    end
    if not full then
      local rest = left
      for _, one in ipairs(open) do
        one.share = math.floor(left * one.weight / sum)
        rest = rest - one.share
      end
      table.sort(open, function(a, b)
        local more_a, more_b = a.has - a.share, b.has - b.share
        if more_a ~= more_b then return more_a > more_b end
        return a.name < b.name
      end)
      for i, one in ipairs(open) do
        if one.name == consumer then return one.share + (i <= rest and 1 or 0) end
      end
    end
    open = still
  end
end

local share = share_of_mine()
local has = redis.call('SCARD', set_of(consumer))
local room = math.min(most, share - has, AT_ONCE)

local function give_up(stream, id, items, reason)
  redis.call('XADD', DEAD, '*', 'reason', reason, 'id', id, 'stream', stream, unpack(items, 1, math.min(#items, MOST_ITEMS)))
end

local given = {}
local steps = AT_ONCE -- what is not to be given to anybody makes no less room, and there may be any number of it
while recovers and room > 0 and steps > 0 do
  steps = steps - 1
  local stream = redis.call('LPOP', FREE)
  if not stream then break end
  local falls = tonumber(redis.call('HGET', FALLS, stream) or 0)
  if most_falls > 0 and falls >= most_falls then
    local id = redis.call('HGET', STREAMS, stream)
    give_up(stream, id, describe(id), 'its owner was lost ' .. falls .. ' times')
    strike_off(group, stream)
    tell('dead letter', stream, '')
  else
    given[#given + 1] = give(group, stream, consumer)
    room = room - 1
  end
end

local function stream_in(items)
  for i = 1, #items, 2 do
    if items[i] == FIELD then
      local ok, found = pcall(cjson.decode, items[i + 1])
      local name = ok and type(found) == 'table' and found['DataStreamName']
      if type(name) == 'string' and name ~= '' then return name end
      return nil, 'its ' .. FIELD .. ' is no JSON object with a DataStreamName'
    end
  end
  return nil, 'it has no field ' .. FIELD
end

-- New announcements
while room > 0 and steps > 0 do
  local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', math.min(room, steps), 'STREAMS', INPUT, '>')
  if not reply then break end
  steps = steps - #reply[1][2]
  for _, entry in ipairs(reply[1][2]) do
    local id, items = entry[1], entry[2]
    local stream, why = stream_in(items)
    local known = stream and redis.call('HGET', STREAMS, stream)
    if not stream then
      give_up('', id, items, why)
      drop(group, id)
    elseif known == id then -- the group was lost and made again
      hold_by(group, owner_of(stream) or WAITING, id)
    elseif known then -- announced twice: one stream has one owner
      drop(group, id)
    else
      redis.call('HSET', STREAMS, stream, id)
      given[#given + 1] = give(group, stream, consumer)
      room = room - 1
    end
  end
end
has = redis.call('SCARD', set_of(consumer))
more = more or (room > 0 and steps <= 0) or (room <= 0 and #given > 0 and has < share)

-- What to give back: some of what is too much in each round, so that nothing stands still while streams move.
local excess = 0
if fraction > 0 and has - leaving > share and redis.call('LLEN', FREE) == 0 then
  local moved = tonumber(redis.call('GET', BASE .. 'moves') or 0)
  local allowed = math.max(LEAST_MOVES, math.floor(total * fraction)) - moved
  excess = math.max(0, math.min(has - leaving - share, allowed))
  if excess > 0 then
    redis.call('INCRBY', BASE .. 'moves', excess)
    if moved == 0 then redis.call('PEXPIRE', BASE .. 'moves', round_ms) end
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
  for _, stream in ipairs(redis.call('SMEMBERS', set_of(consumer))) do
    local _, token = owner_of(stream)
    all[#all + 1] = lease_on(stream, token)
  end
end
local free_now = recovers and {} or redis.call('LRANGE', FREE, 0, AT_ONCE - 1)
return {
  'OK', redis.call('HGET', META, 'born'), is_new and 1 or 0, next_ms, total, has, share, excess, more and 1 or 0,
  newest(INPUT), newest(EVENTS), found_lost, late_ms, given, free_now, all,
}
