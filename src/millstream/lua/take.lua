#!lua
-- Lease lines that are ready to a worker, with the first entries of each; lines whose lease or back-off is over are ready.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 consumer   4 its incarnation   5 lease in milliseconds
--       6 most lines   7 most entries of all   8 most entries of one line   9 '1' if states are wanted
--       10 most lines that the consumer may have in all, if there is such a limit
-- REPLY milliseconds until a line may become ready by itself (-1 = none waits), ids that are gone from the stream,
--       number of leases that had run out, then for each line: name, lease token, state, how often a lease on its first
--       entry ran out, attempts on it that failed, entries
-- ERROR STALE when a newer run has taken over; NOGROUP when the group is gone
--
-- INVARIANTS  A line is leased to one worker at a time, by the server's clock, and no two leases have the same token: its
--   number grows, even if a failover has lost the last ones, and `commit` asks for it. Lines take turns. An
--   entry whose lease ran out before may have killed its worker, so it is given out by itself, and counted.

-- include ids
-- include lines

local group, consumer, incarnation = ARGV[2], ARGV[3], ARGV[4]
local lease_ms, most_lines, most_entries, longest = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local AT_ONCE, FURTHEST_MS = 200, 600000

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'fence')
local refusal = stale(ARGV[1], meta[1])
if refusal then return refusal end
local probe = redis.pcall('XPENDING', KEYS[7], group, '-', '+', 1)
if probe.err then return probe end

local now = redis.call('TIME')
local fence = now[1] * 1000000 + now[2]
local ms = math.floor(fence / 1000)
if meta[2] and tonumber(meta[2]) >= fence then fence = tonumber(meta[2]) + 1 end

-- So far ahead no lease ends: the clock went back, with a failover, say.
local ahead = redis.call('ZRANGEBYSCORE', LEASES, ms + math.max(10 * lease_ms, FURTHEST_MS), '+inf', 'LIMIT', 0, AT_ONCE)
for _, name in ipairs(ahead) do redis.call('ZADD', LEASES, ms + lease_ms, name) end

-- Both lists come out in the order in which they were due, so the first is put first last.
local reaped = redis.call('ZRANGEBYSCORE', LEASES, '-inf', ms, 'LIMIT', 0, AT_ONCE)
for i = #reaped, 1, -1 do
  local name = reaped[i]
  local head = redis.call('LINDEX', line_of(name), 0)
  if head then redis.call('HINCRBY', KEYS[4], head .. 'l', 1) end
  end_lease(group, name, longest)
  line_up(name, true)
end
local due = redis.call('ZRANGEBYSCORE', BACKOFF, '-inf', ms, 'LIMIT', 0, AT_ONCE)
for i = #due, 1, -1 do
  redis.call('ZREM', BACKOFF, due[i])
  line_up(due[i], true)
end

if ARGV[10] then
  local held = 0
  for _, owner in ipairs(redis.call('HVALS', OWNERS)) do
    if string.match(owner, '^%d+ %S+ (.*)$') == consumer then held = held + 1 end
  end
  most_lines = math.min(most_lines, tonumber(ARGV[10]) - held)
end

local gone = {}
local MOST_GONE = 1000
-- What is missing among the claimed is not in the stream any more: nobody can process it.
local function drop_missing(name, ids, entries)
  local there = {}
  for _, entry in ipairs(entries) do there[entry[1]] = true end
  for _, id in ipairs(ids) do
    if not there[id] then
      redis.call('LREM', line_of(name), 1, id)
      redis.call('HDEL', KEYS[4], id, id .. 'f', id .. 'l')
      gone[#gone + 1] = id
    end
  end
end

local function claim(name, count)
  while true do
    local ids = redis.call('LRANGE', line_of(name), 0, count - 1)
    if #ids == 0 then return ids end
    local ask = {KEYS[7], group, consumer, 0, unpack(ids)}
    ask[#ask + 1] = 'FORCE'
    local entries = redis.call('XCLAIM', unpack(ask))
    if #entries < #ids then drop_missing(name, ids, entries) end
    if #entries > 0 then return entries end
    if #gone >= MOST_GONE then -- somebody has trimmed what waits: the rest is for the next call
      line_up(name, true)
      return entries
    end
  end
end

-- Of a line's first entries, those that are given out together: one that failed, or whose lease ran out, comes first, alone.
local any_struck = redis.call('EXISTS', KEYS[4]) == 1
local function run_of(name, head_struck, most)
  if head_struck then return 1 end
  if not any_struck or most == 1 then return most end
  local ids = redis.call('LRANGE', line_of(name), 1, most - 1)
  for i, id in ipairs(ids) do
    local struck = redis.call('HMGET', KEYS[4], id, id .. 'f', id .. 'l')
    if struck[1] or struck[2] or struck[3] then return i end
  end
  return most
end

local taken, count = {}, 0
while #taken < most_lines and count < most_entries and #gone < MOST_GONE do
  local name = redis.call('LPOP', READY)
  if not name then break end
  local head = redis.call('LINDEX', line_of(name), 0) or ''
  local struck = redis.call('HMGET', KEYS[4], head, head .. 'f', head .. 'l')
  local run = run_of(name, struck[1] or struck[2] or struck[3], math.min(longest, most_entries - count))
  local entries = claim(name, run)
  if #entries > 0 then
    if entries[1][1] ~= head then
      head = entries[1][1]
      struck = redis.call('HMGET', KEYS[4], head, head .. 'f', head .. 'l')
    end
    local token = string.format('%.0f %s %s', fence, incarnation, consumer)
    fence = fence + 1
    redis.call('HSET', OWNERS, name, token)
    redis.call('ZADD', LEASES, ms + lease_ms, name)
    local state = ARGV[9] == '1' and string.sub(name, 1, 1) == 'k' and redis.call('HGET', KEYS[3], string.sub(name, 2))
    taken[#taken + 1] = {name, token, state or '', tonumber(struck[3] or 0), tonumber(struck[2] or 0), entries}
    count = count + #entries
  end
end
if #taken > 0 then redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', fence)) end
if redis.call('LLEN', READY) == 0 then
  redis.call('UNLINK', WAKE) -- nobody need look
elseif #taken >= most_lines or count >= most_entries then
  wake(1)
end

local wait_ms = -1
for _, times in ipairs({LEASES, BACKOFF}) do
  local first = redis.call('ZRANGE', times, 0, 0, 'WITHSCORES')
  if first[2] then
    local left = math.max(0, tonumber(first[2]) - ms + 1)
    if wait_ms < 0 or left < wait_ms then wait_ms = left end
  end
end
return {wait_ms, gone, #reaped, unpack(taken)}
