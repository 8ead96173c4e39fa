#!lua
-- Lease ready key queues to a worker, with the first entries of each; queues whose lease or back-off is over are ready.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 consumer   4 its incarnation   5 lease in milliseconds
--       6 most queues   7 most entries of all   8 most entries of one queue   9 '1' if states are wanted
--       10 most bytes of all entries   11 average bytes of an entry   12 '1' if one is wanted however large it is
--       13 milliseconds that a queue waits after the first loss of a lease on its first entry (0 = not at all)
--       14 factor of each further wait   15 longest wait in milliseconds   16 most entries that run together
--       17 most queues that the consumer may hold in all: for a master, in the name of a consumer; '' or absent = any
--       18 milliseconds that the first entry of a queue waits for so many that run together; absent = not at all
-- REPLY milliseconds until a queue may become ready by itself (-1 = none waits), ids that are gone from the stream,
--       number of expired leases, size of the first entry that did not fit (0 = all did), then for each queue: name,
--       lease token, state, how often a lease on its first entry expired, failed attempts on it (0 = it has only
--       waited, -1 = neither), of each entry its id and then its fields, '' or the message that has canceled entries of the key and the last id that it
--       has canceled
-- ERROR STALE when a newer run has taken over; NOGROUP when the group does not exist
--
-- INVARIANTS  A queue is leased to one worker at a time, by the server's clock, and no two leases have the same token:
--   its number grows, even if a failover has lost the last ones, and commit.lua checks it. Queues are leased round
--   robin. An entry whose lease expired before may have killed its worker, so it is leased alone, and counted; and
--   not at once, as it might kill one worker after another while the others start. A queue that waits for more entries
--   backs off until its first one has waited; include/routing.lua ends that once there are enough.

-- include ids
-- include key_queues
-- include lost_leases
-- include entry_sizes
-- include expiring_state
-- include refusal

local group, consumer, incarnation = ARGV[2], ARGV[3], ARGV[4]
local lease_ms, longest = tonumber(ARGV[5]), tonumber(ARGV[8])
local max_queues, max_entries = tonumber(ARGV[6]), tonumber(ARGV[7])
local max_bytes, about, is_one_wanted = tonumber(ARGV[10]), tonumber(ARGV[11]), ARGV[12] == '1'
local AT_ONCE, FURTHEST_MS, STEP_MS = 200, 600000, 1000

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'fence', 'clock')
local refusal = stale(ARGV[1], meta[1])
if refusal then return refusal end
local probe = redis.pcall('XPENDING', KEYS[7], group, '-', '+', 1)
if probe.err then return named(probe, 'XPENDING', KEYS[7]) end

local now = redis.call('TIME')
local fence = now[1] * 1000000 + now[2]
local ms = math.floor(fence / 1000)
if meta[2] and tonumber(meta[2]) >= fence then fence = tonumber(meta[2]) + 1 end

-- No lease ends so far ahead: the clock went back, with a failover for example. Where it is known by how much,
-- back-offs end earlier by that.
local back_ms = meta[3] and tonumber(meta[3]) - ms or 0
local furthest_ms = back_ms > STEP_MS and lease_ms or math.max(10 * lease_ms, FURTHEST_MS)
local too_far = redis.call('ZRANGEBYSCORE', LEASES, '(' .. ms + furthest_ms, '+inf')
for _, name in ipairs(too_far) do redis.call('ZADD', LEASES, ms + lease_ms, name) end
if back_ms > STEP_MS then
  local waiting = redis.call('ZRANGE', BACKOFF, 0, -1, 'WITHSCORES')
  for i = 1, #waiting, 2 do redis.call('ZADD', BACKOFF, math.max(ms, waiting[i + 1] - back_ms), waiting[i]) end
  redis.call('HSET', KEYS[1], 'clock', string.format('%.0f', ms))
end

-- ZRANGEBYSCORE returns them in the order in which they expired, so the first is requeued last. Leases that masters
-- hold for consumers are left to master/renew_leases.lua, which checks acknowledgements and liveness: the lease expired
-- because no master ran, or Redis was unavailable.
local delay_ms, factor, max_delay_ms = tonumber(ARGV[13]), tonumber(ARGV[14]), tonumber(ARGV[15])
local together, most_held, wait_for_more_ms = tonumber(ARGV[16]), ARGV[17] ~= '' and ARGV[17], tonumber(ARGV[18] or 0)
local expired = most_held and {} or redis.call('ZRANGEBYSCORE', LEASES, '-inf', ms, 'LIMIT', 0, AT_ONCE)
for i = #expired, 1, -1 do
  end_lost_lease(group, expired[i], longest, ms, delay_ms, factor, max_delay_ms, together)
end

local any_counts = redis.call('EXISTS', KEYS[4]) == 1
local due = redis.call('ZRANGEBYSCORE', BACKOFF, '-inf', ms, 'LIMIT', 0, AT_ONCE)
for _, name in ipairs(due) do
  redis.call('ZREM', BACKOFF, name)
  -- Behind the others: keys that fail all the time must not starve them. After a lost lease, before the others.
  make_ready(name, any_counts and has_waited_for_loss(name))
end

if most_held then
  local held = 0
  for _, owner in ipairs(redis.call('HVALS', OWNERS)) do
    if string.match(owner, '^%d+ %S+ (.*)$') == consumer then held = held + 1 end
  end
  max_queues = math.min(max_queues, tonumber(most_held) - held)
end

local gone = {}
local MOST_GONE = 1000
-- An entry that XCLAIM does not return is no longer in the stream: no worker can process it.
local function drop_missing(name, ids, entries)
  local there = {}
  for _, entry in ipairs(entries) do there[entry[1]] = true end
  for _, id in ipairs(ids) do
    if not there[id] then
      redis.call('LREM', queue_of(name), 1, id)
      clear_crash_counts(id)
      gone[#gone + 1] = id
    end
  end
end

local NO_COUNTS, counts = {}, {}
local function crash_counts_of(id)
  if not any_counts then return NO_COUNTS end
  counts[id] = counts[id] or redis.call('HMGET', KEYS[4], id, id .. 'f', id .. 'l')
  return counts[id]
end

-- The first entries of a queue that are leased together: an entry that failed, or whose lease expired, is leased alone.
local function run_of(name, most)
  local ids = redis.call('LRANGE', queue_of(name), '0', most - 1)
  for i = 1, any_counts and #ids or 0 do
    local count_of = crash_counts_of(ids[i])
    if count_of[1] or count_of[2] or count_of[3] then return {unpack(ids, 1, math.max(1, i - 1))} end
  end
  return ids
end

-- The entries of a queue's run; none if it is empty, nil if the rest of it is for the next call, since queued entries
-- were trimmed.
local function claim(name, most)
  while true do
    local ids = run_of(name, most)
    if #ids == 0 then return ids end
    local count = #ids
    ids[count + 1] = 'FORCE'
    local entries = redis.call('XCLAIM', KEYS[7], group, consumer, '0', unpack(ids))
    ids[count + 1] = nil
    if #entries < count then drop_missing(name, ids, entries) end
    if #entries > 0 then return entries end
    if #gone >= MOST_GONE then return nil end
  end
end

local leased, count, used, bytes, unfit = {}, 0, 0, 0, 0

-- The ids and fields of the entries for which there is room; the others stay unleased. One is leased however large it is,
-- if the caller wants one: otherwise a large entry would never run. No table for each entry: the server takes far longer
-- to reply with one.
local function fitting(entries)
  local found = {}
  for i, entry in ipairs(entries) do
    local size = size_of(entry)
    if bytes + size > max_bytes and not (is_one_wanted and count == 0 and i == 1) then
      unfit = size
      local rest = {}
      for j = i, #entries do rest[#rest + 1] = entries[j][1] end
      assign_pending(group, WAITING, rest)
      return found
    end
    found[2 * i - 1], found[2 * i] = entry[1], entry[2]
    bytes = bytes + size
  end
  return found
end

local function lease_queue(name)
  -- No more than the estimate allows: claimed entries are in Redis' memory once more.
  local affordable = math.max(1, math.floor((max_bytes - bytes) / about))
  local entries = claim(name, math.min(longest, max_entries - count, affordable))
  if not entries then return end
  entries = fitting(entries)
  if #entries == 0 and unfit > 0 then return end
  used = used + 1
  if #entries == 0 then return end
  local count_of = crash_counts_of(entries[1])
  if count_of[3] == '0' then redis.call('HDEL', KEYS[4], entries[1] .. 'l') end -- it is alone now
  leased[#leased + 1] = {
    name, string.format('%.0f %s %s', fence, incarnation, consumer), '',
    tonumber(count_of[3] or 0), tonumber(count_of[2] or -1), entries, '',
  }
  fence = fence + 1
  count = count + #entries / 2
end

local MOST_WAITING, waiting = 1000, {}

-- Whether a queue waits for more entries that run together. The first one has waited since it was added to the stream,
-- as its id says. One that failed, or whose lease expired, runs alone, and so does not wait.
local function waits_for_more(name)
  if wait_for_more_ms == 0 or string.sub(name, 1, 1) ~= 'k' then return false end
  local head = redis.call('LINDEX', queue_of(name), '0')
  if not head or redis.call('LLEN', queue_of(name)) >= together then return false end
  local count_of = crash_counts_of(head)
  if count_of[1] or count_of[2] or count_of[3] then return false end
  local due = math.min(ms, tonumber(string.match(head, '^%d+'))) + wait_for_more_ms
  if due <= ms then return false end
  waiting[#waiting + 1] = {due, name}
  return true
end

-- Whether the rest of this call would cut the list of a queue short that has waited for its entries.
local function is_short_of_room(name)
  local room = max_entries - count
  if wait_for_more_ms == 0 or #leased == 0 or room >= together then return false end
  return redis.call('LLEN', queue_of(name)) > room
end

-- Store who holds the queues, and until when, with one command for many; and load their states.
local function store_leases(from, to)
  local owners, deadlines, fields, deadline = {}, {}, {}, string.format('%.0f', ms + lease_ms)
  for i = from, to do
    local name, token = leased[i][1], leased[i][2]
    owners[#owners + 1], owners[#owners + 2] = name, token
    deadlines[#deadlines + 1], deadlines[#deadlines + 2] = deadline, name
    fields[#fields + 1] = string.sub(name, 2)
  end
  redis.call('HSET', OWNERS, unpack(owners))
  redis.call('ZADD', LEASES, unpack(deadlines))
  local states = ARGV[9] == '1' and redis.call('HMGET', KEYS[3], unpack(fields)) or {}
  for i, state in ipairs(states) do
    local one = leased[from + i - 1]
    if state and string.sub(one[1], 1, 1) == 'k' then one[3] = live_state(state, ms) or '' end
  end
end

-- Add which of the queues have canceled entries.
local function add_cancellations(from, to)
  local names = {}
  for i = from, to do names[#names + 1] = leased[i][1] end
  for i, stored in ipairs(redis.call('HMGET', CANCELED, unpack(names))) do
    local one = leased[from + i - 1]
    if stored and less(string.match(stored, ' (.*)$'), one[6][1]) then
      redis.call('HDEL', CANCELED, one[1]) -- it is over
    elseif stored then
      one[7] = stored
    end
  end
end

-- Queues are removed from the ready list at the end, together: if anything fails before, they are still ready.
local is_full = false
while #leased < max_queues and count < max_entries and #gone < MOST_GONE and unfit == 0 and #waiting < MOST_WAITING
  and not is_full do
  local least = math.min(max_queues - #leased, math.ceil((max_entries - count) / longest))
  local names = redis.call('LRANGE', READY, used, used + least - 1)
  if #names == 0 then break end
  for _, name in ipairs(names) do
    if #gone >= MOST_GONE or unfit > 0 then break end
    if waits_for_more(name) then
      used = used + 1
    else
      is_full = is_short_of_room(name)
      if is_full then break end
      lease_queue(name)
    end
  end
end
local any_canceled = #leased > 0 and redis.call('EXISTS', CANCELED) == 1
for i = 1, #leased, MAX_UNPACK do
  local last = math.min(i + MAX_UNPACK - 1, #leased)
  store_leases(i, last)
  if any_canceled then add_cancellations(i, last) end
end
for _, one in ipairs(waiting) do redis.call('ZADD', BACKOFF, one[1], one[2]) end
if used > 0 then redis.call('LTRIM', READY, used, -1) end
if #leased > 0 then
  redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', fence), 'clock', string.format('%.0f', ms))
end
if redis.call('LLEN', READY) == 0 then
  redis.call('UNLINK', NOTIFY) -- no worker needs to fetch
elseif #leased >= max_queues or count >= max_entries or unfit > 0 or wait_for_more_ms > 0 then
  notify_idle(1)
end

local wait_ms = -1
for _, times in ipairs({LEASES, BACKOFF}) do
  local first = redis.call('ZRANGE', times, 0, 0, 'WITHSCORES')
  if first[2] then
    local left = math.max(0, tonumber(first[2]) - ms + 1)
    if wait_ms < 0 or left < wait_ms then wait_ms = left end
  end
end
if #waiting >= MOST_WAITING then wait_ms = 0 end -- others may be ready behind them
return {wait_ms, gone, #expired, unfit, unpack(leased)}
