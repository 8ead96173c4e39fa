#!lua
-- Commit the effects of messages: state, output entries, dead letters and their completion, in one atomic step.
--
-- KEYS  1 meta (hash: committed id, epoch, highest offset, owner, counters)   2 key offsets (hash)   3 state (hash)
--       4 crash counts (hash)   5 dead letters (stream)   6 incomplete entries (hash)   7 the input stream
--       8.. output streams
-- ARGV  1 token: the run's epoch   2 consumer group of the workers   3 consumer, or '' on Spark
--       4 number of this call, which grows, of a worker that may repeat it, or ''
--       5 number of bare ids, the ids in ascending order: messages of a worker without effects, each its own unit
--       then any number of units, one per run of messages of one key (or one unkeyed message, or a batch of them):
--         offset field, expected offset ('' = none), first id, last id, number of messages
--           (for a worker's key: the name of its queue and the lease's token; on Spark, for entries that were run from
--           a
--           key queue: its name and 'line')
--         number of other ids, the ids: the rest of a worker's batch, all of which must be uncommitted and held by the
--           worker as well; or the entries before the last id in a key queue
--         '' or, if the lease ends with it, how many entries of the queue are given out and not committed
--         state: '' (untouched), 'S' field value (set) or 'D' field (delete)
--         number of crash-count fields to clear, the fields
--         number of outputs, each: index into KEYS, length to trim the stream to (0 = no trimming),
--           number of items, the items (name, value, ...)
--         number of dead letters, each: number of items, the items
-- REPLY list of the numbers (1 = first) of the units that were refused, nothing of which is written: their offset or
--       the committed id has moved on, so some of their messages are committed already; or, for a worker, the entry is
--       not pending with it any more; or, on Spark, the key is parked, or entries before it wait in its queue
-- ERROR STALE when the token is older than the epoch: a newer run has taken over
--       NOPERM and others when Redis refuses one of the writes: the unit that it belongs to has no offset then
--
-- INVARIANTS  A unit is written only if its key's offset is the one that the caller loaded with the state, and all its
--   ids
--   lie beyond the stream's committed id or are incomplete. So of two executions of a message at most one commits, in
--   stream order, and repeating a commit whose reply was lost is refused without harm. A worker's entry must also be
--   pending with this worker, so that an entry that was claimed by another commits nothing (XACK by itself does not
--   check
--   the consumer); of a batch, whose outputs belong to all of it, each entry must be, and each gets its own offset.
--   Entries of a key are committed under its lease, and only if they are the first of its queue; they leave the queue
--   with
--   their effects, and need no offsets. On Spark a key that has a queue commits only the first entries of that queue. A
--   call that a worker repeats gets the first reply. Writes that can be refused come before the offset, since a script
--   is
--   not rolled back: an offset without its effects would be a loss. `top` is never below any offset. No flag allow-oom:
--   at
--   maxmemory the whole script is refused before it writes.

-- include ids
-- include refusal
-- include key_queues

local function check_type(key, wanted)
  local found = redis.call('TYPE', key)['ok']
  if found ~= 'none' and found ~= wanted then
    return 'WRONGTYPE ' .. key .. ' holds a ' .. found .. ' where a ' .. wanted .. ' is needed'
  end
end

for i = 1, #KEYS do
  local problem = check_type(KEYS[i], (i <= 4 or i == 6) and 'hash' or 'stream')
  if problem then return redis.error_reply(problem) end
end

local token, group, consumer = ARGV[1], ARGV[2], ARGV[3]
local works = consumer ~= ''
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'frontier', 'top', 'engine')
local frontier, top = meta[2], meta[3]
local refusal = stale(token, meta[1])
if refusal then return refusal end

-- Without a lease no entry of a key queue may be committed: it would stay in its queue, and be processed again.
local keyed = works and meta[4] == 'keyed'
if keyed and ARGV[5] ~= '0' then
  return redis.error_reply('UNLEASED messages of a key must be committed under its lease')
end

local replay = ARGV[4] ~= '' and BASE .. consumer .. ':last'
local answered = replay and redis.call('GET', replay)
if answered and string.match(answered, '^%S+') == ARGV[4] then
  local numbers = {}
  for number in string.gmatch(string.sub(answered, #ARGV[4] + 1), '%d+') do numbers[#numbers + 1] = tonumber(number) end
  return numbers
end

local at = 5
local function take()
  at = at + 1
  return ARGV[at]
end

local function take_count()
  return tonumber(take())
end

local failure
local function try(...)
  if failure then return end
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then failure = named(reply, select(1, ...), select(2, ...)) end
end

local function add(key, maxlen, items)
  if maxlen == '0' then
    try('XADD', key, '*', unpack(ARGV, at + 1, at + items))
  else
    try('XADD', key, 'MAXLEN', '~', maxlen, '*', unpack(ARGV, at + 1, at + items))
  end
end

local frontier_ms = frontier and string.match(frontier, '^%d+')

local function is_beyond(id)
  if not frontier then return true end
  local ms = string.match(id, '^%d+')
  if ms ~= frontier_ms then return less_number(frontier_ms, ms) end
  return less(frontier, id)
end

local function is_open(id)
  return works and redis.call('HEXISTS', KEYS[6], id) == 1
end

local function in_hand(id)
  return not works or #redis.call('XPENDING', KEYS[7], group, id, id, 1, consumer) == 1
end

-- Whether one more entry of a batch may be committed.
local function joins(id)
  local new = redis.call('HEXISTS', KEYS[2], 'i' .. id) == 0 and (is_beyond(id) or is_open(id))
  if not new then redis.call('XACK', KEYS[7], group, id) end
  return new and in_hand(id)
end

local function finish(id, mark, beyond)
  if works then try('XACK', KEYS[7], group, id) end
  if beyond then try('HSET', KEYS[2], mark, id) else try('HDEL', KEYS[6], id) end
  if not failure and (not top or less(top, id)) then top = id end
end

local ended, is_ended, next_up = {}, {}, {}
local any_parked

-- Whether these are the first entries of a key queue; and whether others come after them.
local function leads(name, others_at, others, last)
  local ids = redis.call('LRANGE', line_of(name), '0', others + 1)
  for i = 1, others do
    if ids[i] ~= ARGV[others_at + i] then return false end
  end
  return ids[others + 1] == last, ids[others + 2] ~= nil
end

local function end_turn(name, left, has_more)
  let_go(group, name, tonumber(left))
  ended[#ended + 1], is_ended[name] = name, true
  if any_parked == nil then any_parked = redis.call('EXISTS', PARKED) == 1 end
  if has_more and not (any_parked and redis.call('HEXISTS', PARKED, name) == 1) then next_up[#next_up + 1] = name end
end

local function leave_line(name, others_at, others, last, left, has_more)
  try('XACK', KEYS[7], group, last, unpack(ARGV, others_at + 1, others_at + others))
  try('LTRIM', line_of(name), others + 1, '-1')
  if left ~= '' and not failure then end_turn(name, left, has_more) end
  if not works and not failure then drop_empty(name) end
end

-- Leases that end are released together: one command per queue would cost more than the rest of a short lease.
local function end_turns()
  end_leases(ended)
  for i = 1, #next_up, PASSED_AT_ONCE do
    redis.call('RPUSH', READY, unpack(next_up, i, math.min(i + PASSED_AT_ONCE - 1, #next_up)))
  end
end

local refused, unit = {}, 0
local committed, written, dead = 0, 0, 0

-- Bare ids take the same steps as units do below, a thousand with each command: one command per id would cost the
-- server far more than the commit itself.
local function commit_bare(from, to)
  local held, accepted, marks, known = {}, {}, {}, {}
  local most = 2 * (to - from + 1)
  for _, item in ipairs(redis.call('XPENDING', KEYS[7], group, ARGV[from], ARGV[to], most, consumer)) do
    held[item[1]] = true
  end
  -- No offset is above `top`: the usual entry is, and need not be looked up.
  if top and not less(top, ARGV[from]) then
    local names = {}
    for i = from, to do names[i - from + 1] = 'i' .. ARGV[i] end
    known = redis.call('HMGET', KEYS[2], unpack(names))
  end
  for i = from, to do
    local id, beyond = ARGV[i], is_beyond(ARGV[i])
    local new = not known[i - from + 1] and (beyond or is_open(id))
    if new and (held[id] or in_hand(id)) then
      accepted[#accepted + 1] = id
      if beyond then
        marks[#marks + 1] = 'i' .. id
        marks[#marks + 1] = id
      else
        redis.call('HDEL', KEYS[6], id)
      end
    else
      refused[#refused + 1] = i - 5
      if not new then redis.call('XACK', KEYS[7], group, id) end
    end
  end
  if #accepted > 0 then try('XACK', KEYS[7], group, unpack(accepted)) end
  if #marks > 0 then
    try('HSET', KEYS[2], unpack(marks))
    if not top or less(top, marks[#marks]) then top = marks[#marks] end
  end
  committed = committed + #accepted
end

-- On Spark there are few key queues, if any.
local any_aside = not works and some_lines()

local bare = tonumber(ARGV[5])
for from = 6, 5 + bare, 1000 do commit_bare(from, math.min(from + 999, 5 + bare)) end
at, unit = 5 + bare, bare

-- Whether a unit may be written. If not, entries that are committed already are acknowledged.
local function may_write(mark, expected, first, last, others_at, others)
  local new = (redis.call('HGET', KEYS[2], mark) or '') == expected and (is_beyond(first) or is_open(first))
  local accepted = new and in_hand(last)
  for i = others_at + 1, others_at + others do accepted = joins(ARGV[i]) and accepted end
  if works and not new then redis.call('XACK', KEYS[7], group, last) end
  return accepted
end

while at < #ARGV and not failure do
  unit = unit + 1
  local mark, expected, first, last, messages = take(), take(), take(), take(), take_count()
  local others = take_count()
  local others_at = at
  at = at + others
  local left = take()
  local in_line = keyed or (works and expected ~= '') or expected == 'line'
  local accepted, has_more
  if in_line then
    if works then
      accepted = not is_ended[mark] and holds(mark, expected)
    else
      accepted = redis.call('HEXISTS', PARKED, mark) == 0
    end
    if accepted then accepted, has_more = leads(mark, others_at, others, last) end
  else
    accepted = not (any_aside and is_aside(mark)) and may_write(mark, expected, first, last, others_at, others)
  end
  if not accepted then refused[#refused + 1] = unit end

  local change = take()
  local field = change ~= '' and take()
  local value = change == 'S' and take()
  local struck = take_count()
  local struck_at = at
  at = at + struck

  local outputs = take_count()
  for _ = 1, outputs do
    local key, maxlen, items = take_count(), take(), take_count()
    if accepted then add(KEYS[key], maxlen, items) end
    at = at + items
  end
  local letters = take_count()
  for _ = 1, letters do
    local items = take_count()
    if accepted then add(KEYS[5], '0', items) end
    at = at + items
  end

  if accepted then
    if value then try('HSET', KEYS[3], field, value) elseif field then try('HDEL', KEYS[3], field) end
    for i = struck_at + 1, struck_at + struck do try('HDEL', KEYS[4], ARGV[i]) end
    if in_line then
      leave_line(mark, others_at, others, last, left, has_more)
    else
      for i = others_at + 1, others_at + others do finish(ARGV[i], 'i' .. ARGV[i], is_beyond(ARGV[i])) end
      finish(last, mark, is_beyond(last))
    end
    if not failure then
      committed, written, dead = committed + messages, written + outputs, dead + letters
    end
  end
end

if committed > 0 then
  if top then redis.call('HSET', KEYS[1], 'top', top) end
  redis.call('HINCRBY', KEYS[1], 'committed', committed)
end
if written > 0 then redis.call('HINCRBY', KEYS[1], 'written', written) end
if dead > 0 then redis.call('HINCRBY', KEYS[1], 'dead', dead) end
if #refused > 0 then redis.call('HINCRBY', KEYS[1], 'refused', #refused) end
end_turns()
wake(#next_up)
if replay and not failure then redis.call('SET', replay, ARGV[4] .. ' ' .. table.concat(refused, ' '), 'EX', 3600) end
return failure or refused
