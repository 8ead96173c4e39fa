#!lua
-- Commit the effects of messages: state, output entries, dead letters and their completion, in one atomic step.
--
-- KEYS  1 meta (hash: committed id, epoch, highest offset, owner, number of groups, counters)   2 key offsets (hash)   3 state (hash)
--       4 crash counts (hash)   5 dead letters (stream)   6 incomplete entries (hash)   7 the input stream
--       8.. output streams
-- ARGV  1 token: the run's epoch   2 consumer group of the workers   3 consumer, or '' on Spark
--       4 number of this call, which grows, of a worker that may repeat it, or ''
--       5 number of bare ids, the ids in ascending order: messages of a worker without effects, each its own unit
--       then any number of units, one per run of messages of one key (or one unkeyed message, or a batch of them):
--         offset field, expected offset ('' = none), first id, last id, number of messages
--           (for a worker's key: the name of its queue and the lease's token; on Spark, for entries that were run from
--           a key queue: its name and 'queue')
--         number of other ids, the ids: the rest of a worker's batch, all of which must be uncommitted and held by the
--           worker as well; or the entries before the last id in a key queue
--         '' or, if the lease ends with it, how many of its entries are claimed and not committed
--         '' or the id of the entry whose dead letter cancels the rest of the key; '-' if its entries were canceled
--         state: '' (untouched), 'S' field value (set), 'D' field (delete) or 'E' field value duration (set, and let it
--           expire so many milliseconds later, unless it is set again)
--         number of crash-count fields to clear, the fields
--         none, or, if messages are for another handler alone: 'O', how many of them
--         none, or, if entries are edited copies of dead letters: 'R', number of these entries, their ids
--         number of outputs; if there are any: index into KEYS, length to trim the stream to (0 = no trimming), and each
--           as its items (name, value, ...) in msgpack, one after the other
--         none, or, if timers of the key change: 'T', number of changes, each: id of the timer, ms until it is due ('' =
--           cancel it), its entry as a msgpack array of its items
--         number of dead letters, each: number of items, the items
-- REPLY list of the numbers (1 = first) of the units that were refused, nothing of which is written: their offset or
--       the committed id has moved on, so some of their messages are committed already; or, for a worker, the entry is
--       not pending with it any more; or, on Spark, the key is parked, or entries before it wait in its queue. Then, for
--       a worker of a handler with a key, and on Spark while there are key queues, the lowest id that is pending, if any
-- ERROR STALE when the token is older than the epoch: a newer run has taken over
--       NOPERM and others when Redis refuses one of the writes: the unit that it belongs to has no offset then
--
-- INVARIANTS  A unit is written only if its key's offset is the one that the caller loaded with the state, and all its
--   ids lie beyond the stream's committed id or are incomplete. So of two executions of a message at most one commits,
--   in stream order, and repeating a commit whose reply was lost is refused without harm. A worker's entry must also be
--   pending with this worker, so that an entry that was claimed by another commits nothing (XACK by itself does not
--   check the consumer); of a batch, whose outputs belong to all of it, each entry must be, and each gets its own
--   offset. The dead letter of an edited copy goes with the unit of the copy. Entries of a key are committed under its
--   lease, and only if they are the first of its queue; they leave the queue with their effects, and need no offsets.
--   On Spark a key that has a queue commits only the first entries of that queue. A call that a worker repeats gets the
--   first reply. Writes that can be refused come before the offset, since a script is not rolled back: an offset without
--   its effects would be a loss. `max_offset` is never below any offset. A worker's chunk of bare ids moves the
--   committed id, as a checkpoint would, if the group has nothing pending up to its last one. No flag allow-oom: at
--   maxmemory the whole script is refused before it writes.

-- include ids
-- include refusal
-- include key_queues
-- include cancellation
-- include resent
-- include acl_probe
-- include field_expiry
-- include expiring_state

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
local is_worker = consumer ~= ''
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'committed_id', 'max_offset', 'owner', 'groups')
local committed_id, max_offset = meta[2], meta[3]
local refusal = stale(token, meta[1])
if refusal then return refusal end

-- Without a lease no entry of a key queue may be committed: it would stay in its queue, and be processed again.
local keyed = is_worker and meta[4] == 'keyed'
if keyed and ARGV[5] ~= '0' then
  return redis.error_reply('UNLEASED messages of a key must be committed under its lease')
end

-- Entries of a key are committed in order: where the lowest pending entry is an earlier one, it is one of another key.
local function with_lowest_pending(numbers)
  local first = redis.pcall('XPENDING', KEYS[7], group, '-', '+', '1')
  if first[1] then numbers[#numbers + 1] = first[1][1] end
  return numbers
end

local replay = ARGV[4] ~= '' and BASE .. consumer .. ':last'
local answered = replay and redis.call('GET', replay)
if answered and string.match(answered, '^%S+') == ARGV[4] then
  local numbers = {}
  for number in string.gmatch(string.sub(answered, #ARGV[4] + 1), '%d+') do numbers[#numbers + 1] = tonumber(number) end
  return keyed and with_lowest_pending(numbers) or numbers
end

local at = 5
local function next_arg()
  at = at + 1
  return ARGV[at]
end

local function next_count()
  return tonumber(next_arg())
end

local failure
local function try(...)
  if failure then return end
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then failure = named(reply, select(1, ...), select(2, ...)) end
end

-- The items go from cmsgpack to XADD directly: a table of them, and one more call, would cost half of what XADD does.
local function add_output(key, maxlen, packed)
  if failure then return end
  local reply
  if maxlen == '0' then
    reply = redis.pcall('XADD', key, '*', cmsgpack.unpack(packed))
  else
    reply = redis.pcall('XADD', key, 'MAXLEN', '~', maxlen, '*', cmsgpack.unpack(packed))
  end
  if type(reply) == 'table' and reply.err then failure = named(reply, 'XADD', key) end
end

local committed_ms = committed_id and string.match(committed_id, '^%d+')

local function is_beyond(id)
  if not committed_id then return true end
  local ms = string.match(id, '^%d+')
  if ms ~= committed_ms then return less_number(committed_ms, ms) end
  return less(committed_id, id)
end

local function is_incomplete(id)
  return is_worker and redis.call('HEXISTS', KEYS[6], id) == 1
end

local function holds_entry(id)
  return not is_worker or #redis.call('XPENDING', KEYS[7], group, id, id, 1, consumer) == 1
end

-- Whether one more entry of a batch may be committed.
local function accepts_entry(id)
  local new = redis.call('HEXISTS', KEYS[2], 'i' .. id) == 0 and (is_beyond(id) or is_incomplete(id))
  if not new then redis.call('XACK', KEYS[7], group, id) end
  return new and holds_entry(id)
end

local function complete_entry(id, offset_field, beyond)
  if is_worker then try('XACK', KEYS[7], group, id) end
  if beyond then try('HSET', KEYS[2], offset_field, id) else try('HDEL', KEYS[6], id) end
  if not failure and (not max_offset or less(max_offset, id)) then max_offset = id end
end

local fields_expire, ms_of_call
local states_marked = 0

-- Why Redis would refuse to let a state expire, if it would; asked before the outputs of the unit are written. A server
-- that is upgraded while the workers run has the command from then on, and the user may lack the right.
local function expiry_problem()
  if fields_expire == nil then fields_expire = can_fields_expire(KEYS[3]) end
  return fields_expire and may('HPEXPIRE', KEYS[3], 1, 'FIELDS', 1, 'f') or nil
end

-- HSET by itself lets the value live for ever: it removes the expiry that the field had.
local function set_expiring(field, value, ttl_ms)
  if fields_expire then
    try('HSET', KEYS[3], field, value)
    try('HPEXPIRE', KEYS[3], ttl_ms, 'FIELDS', 1, field)
  else
    ms_of_call = ms_of_call or now_ms()
    try('HSET', KEYS[3], field, mark_expiry(value, ms_of_call + ttl_ms))
    states_marked = states_marked + 1
  end
end

-- Where the server removes no field by itself, a call samples three states for each that it sets, and removes the expired.
local EXPIRED_SAMPLE = 3

local function drop_some_expired()
  local some = redis.pcall('HRANDFIELD', KEYS[3], EXPIRED_SAMPLE * states_marked, 'WITHVALUES')
  if some.err then return end -- the commit is done; the next run is refused for the lack of this right
  local expired = {}
  for i = 1, #some, 2 do
    if not live_state(some[i + 1], ms_of_call) then expired[#expired + 1] = some[i] end
  end
  for i = 1, #expired, MAX_UNPACK do
    redis.pcall('HDEL', KEYS[3], unpack(expired, i, math.min(i + MAX_UNPACK - 1, #expired)))
  end
end

local STREAM_BASE = string.match(KEYS[1], '^(.*:)[^:]*:meta$')
local DUE, DELAYED = STREAM_BASE .. 'due', STREAM_BASE .. 'delayed'

-- Why Redis would refuse a change of a timer, if it would; asked before the outputs of the unit are written.
local function timer_problem()
  local problem = may('ZADD', DUE, '0', 'm') or may('ZREM', DUE, 'm') or may_write_hash(DELAYED)
  local mismatch = not problem and (check_type(DUE, 'zset') or check_type(DELAYED, 'hash'))
  return mismatch and redis.error_reply(mismatch) or problem
end

-- Why Redis would refuse to remove the dead letter of an edited copy, if it would; asked before the outputs of the unit
-- are written.
local function resend_problem()
  local problem = may('XDEL', KEYS[5], '0-0') or may('XRANGE', KEYS[5], '-', '+') or may('HDEL', RESENT, 'f')
  local mismatch = not problem and check_type(RESENT, 'hash')
  return mismatch and redis.error_reply(mismatch) or problem
end

local function add_dead_letter(from, to)
  local items = {unpack(ARGV, from, to)}
  keep_fields_before_edit(items)
  try('XADD', KEYS[5], '*', unpack(items))
end

local timers_set = 0

-- A timer waits with the delayed messages of the stream, and is moved like them (producer/move_due.lua). Timers that
-- are set with the same delay stay in order: each call has its own microsecond, and within a call each timer is due half
-- a microsecond after the one before it, which is less than a call needs to set it. A score of today has a precision of
-- 1/4096 ms, and until the year 2109 at least one of 1/2048 ms.
local function change_timer(id, delay_ms, packed)
  if delay_ms == '' then
    try('ZREM', DUE, id)
    try('HDEL', DELAYED, id)
  else
    local now = redis.call('TIME')
    local due = now[1] * 1000 + now[2] / 1000 + tonumber(delay_ms) + timers_set / 2048
    try('ZADD', DUE, string.format('%.17g', due), id)
    try('HSET', DELAYED, id, packed)
    timers_set = timers_set + 1
  end
end

local released, is_released, requeued = {}, {}, {}
local any_parked

-- Whether these are the first entries of a key queue; and whether others come after them.
local function is_head(name, others_at, others, last)
  local ids = redis.call('LRANGE', queue_of(name), '0', others + 1)
  for i = 1, others do
    if ids[i] ~= ARGV[others_at + i] then return false end
  end
  return ids[others + 1] == last, ids[others + 2] ~= nil
end

local function release_lease(name, unfinished, has_more)
  unassign_pending(group, name, tonumber(unfinished))
  released[#released + 1], is_released[name] = name, true
  if any_parked == nil then any_parked = redis.call('EXISTS', PARKED) == 1 end
  if has_more and not (any_parked and redis.call('HEXISTS', PARKED, name) == 1) then requeued[#requeued + 1] = name end
end

local function dequeue(name, others_at, others, last, unfinished, has_more)
  try('XACK', KEYS[7], group, last, unpack(ARGV, others_at + 1, others_at + others))
  try('LTRIM', queue_of(name), others + 1, '-1')
  if unfinished ~= '' and not failure then release_lease(name, unfinished, has_more) end
  if not is_worker and not failure then drop_if_empty(name) end
end

-- Leases that end are released together: one command per queue would cost more than the rest of a short lease.
local function release_leases()
  end_leases(released)
  for i = 1, #requeued, MAX_UNPACK do
    redis.call('RPUSH', READY, unpack(requeued, i, math.min(i + MAX_UNPACK - 1, #requeued)))
  end
end

local refused, unit = {}, 0
local committed, written, dead, skipped = 0, 0, 0, 0

-- Two commands tell whether the committed id may move, which pays for no fewer ids than these. One of them returns all
-- groups of the stream, as many as the last checkpoint counted: a group costs the server as much as an offset.
local ADVANCE_FROM = math.max(100, tonumber(meta[5]) or 0)

-- Whether nothing that was delivered up to an entry is pending any more, so that all of it is committed: the rule of
-- checkpoint.lua, which moves the committed id to the last delivered entry.
local function is_all_committed(id)
  local first = redis.call('XPENDING', KEYS[7], group, '-', '+', 1)[1]
  if first and not less(id, first[1]) then return false end
  local groups = redis.pcall('XINFO', 'GROUPS', KEYS[7])
  for _, items in ipairs(groups.err and {} or groups) do
    if items[2] == group then return not less(items[8], id) end -- name, last-delivered-id
  end
  return false
end

-- Move the committed id beyond all offsets and all incomplete entries that it has passed; false if Redis refuses that.
local function move_committed_id(id)
  local moved = redis.pcall('HSET', KEYS[1], 'committed_id', id)
  if type(moved) == 'table' and moved.err then return false end
  committed_id, committed_ms = id, string.match(id, '^%d+')
  -- A checkpoint may have stored entries beyond the committed id as incomplete, while the group was set back.
  redis.pcall('UNLINK', KEYS[2], KEYS[6])
  return true
end

-- Store that a chunk of ids is committed. No offset is above its last one.
local function store_chunk(from, to)
  if to - from + 1 >= ADVANCE_FROM and is_all_committed(ARGV[to]) and move_committed_id(ARGV[to]) then return end
  local offsets, count = {}, 0
  for i = from, to do
    offsets[count + 1], offsets[count + 2] = 'i' .. ARGV[i], ARGV[i]
    count = count + 2
  end
  try('HSET', KEYS[2], unpack(offsets))
  if not failure then max_offset = ARGV[to] end
end

-- Bare ids take the same steps as units do below, a thousand with each command: one command per id would cost the
-- server far more than the commit itself. A chunk of ids that are all new and held, as nearly all are, is committed
-- without a look at each: then there is nothing to return. Else it returns what is pending, and has written nothing.
local function commit_chunk(from, to)
  local pending = redis.call('XPENDING', KEYS[7], group, ARGV[from], ARGV[to], 2 * (to - from + 1), consumer)
  -- The ids ascend. No offset is above `max_offset`: the usual entry is, and need not be looked up.
  if not is_beyond(ARGV[from]) or (max_offset and not less(max_offset, ARGV[from])) then return pending end
  local at = 0
  for i = from, to do
    local id = ARGV[i]
    repeat at = at + 1 until not pending[at] or pending[at][1] == id
    if not pending[at] then return pending end
  end
  try('XACK', KEYS[7], group, unpack(ARGV, from, to))
  if not failure then store_chunk(from, to) end
  if not failure then committed = committed + to - from + 1 end
end

local function commit_bare(from, to)
  if failure then return end
  local pending = commit_chunk(from, to)
  if not pending then return end
  local held, accepted, offsets, incomplete, known = {}, {}, {}, {}, {}
  for _, item in ipairs(pending) do held[item[1]] = true end
  if max_offset and not less(max_offset, ARGV[from]) then
    local names = {}
    for i = from, to do names[i - from + 1] = 'i' .. ARGV[i] end
    known = redis.call('HMGET', KEYS[2], unpack(names))
  end
  for i = from, to do
    local id, beyond = ARGV[i], is_beyond(ARGV[i])
    local new = not known[i - from + 1] and (beyond or is_incomplete(id))
    if new and (held[id] or holds_entry(id)) then
      accepted[#accepted + 1] = id
      if beyond then
        offsets[#offsets + 1] = 'i' .. id
        offsets[#offsets + 1] = id
      else
        incomplete[#incomplete + 1] = id
      end
    else
      refused[#refused + 1] = i - 5
      if not new then redis.call('XACK', KEYS[7], group, id) end
    end
  end
  if #accepted > 0 then try('XACK', KEYS[7], group, unpack(accepted)) end
  if #offsets > 0 then try('HSET', KEYS[2], unpack(offsets)) end
  if #incomplete > 0 then try('HDEL', KEYS[6], unpack(incomplete)) end
  if failure then return end
  if #offsets > 0 and (not max_offset or less(max_offset, offsets[#offsets])) then max_offset = offsets[#offsets] end
  committed = committed + #accepted
end

-- On Spark there are few key queues, if any.
local any_deferred = not is_worker and has_queues()

local bare = tonumber(ARGV[5])
for from = 6, 5 + bare, 1000 do commit_bare(from, math.min(from + 999, 5 + bare)) end
at, unit = 5 + bare, bare

-- Whether a unit may be written. If not, entries that are committed already are acknowledged.
local function may_write(offset_field, expected, first, last, others_at, others)
  local new = (redis.call('HGET', KEYS[2], offset_field) or '') == expected
  new = new and (is_beyond(first) or is_incomplete(first))
  local accepted = new and holds_entry(last)
  for i = others_at + 1, others_at + others do accepted = accepts_entry(ARGV[i]) and accepted end
  if is_worker and not new then redis.call('XACK', KEYS[7], group, last) end
  return accepted
end

while at < #ARGV and not failure do
  unit = unit + 1
  local offset_field, expected, first, last, messages = next_arg(), next_arg(), next_arg(), next_arg(), next_count()
  local others = next_count()
  local others_at = at
  at = at + others
  local unfinished, cancels = next_arg(), next_arg()
  local from_queue = keyed or (is_worker and expected ~= '') or expected == 'queue'
  local accepted, has_more
  if from_queue then
    if is_worker then
      accepted = not is_released[offset_field] and holds_lease(offset_field, expected)
    else
      accepted = redis.call('HEXISTS', PARKED, offset_field) == 0
    end
    if accepted then accepted, has_more = is_head(offset_field, others_at, others, last) end
  else
    accepted = not (any_deferred and is_deferred(offset_field))
    accepted = accepted and may_write(offset_field, expected, first, last, others_at, others)
  end
  if not accepted then refused[#refused + 1] = unit end
  local up_to
  if accepted and cancels ~= '' and cancels ~= '-' then up_to, failure = last_id_of_stream(last) end

  local change = next_arg()
  local field = change ~= '' and next_arg()
  local value = change == 'S' and next_arg()
  local expiring = change == 'E' and {next_arg(), next_arg()}
  local cleared = next_count()
  local cleared_at = at
  at = at + cleared

  local outputs = next_arg()
  local for_others = 0
  if outputs == 'O' then for_others, outputs = next_count(), next_arg() end
  local copies, copies_at = 0, 0
  if outputs == 'R' then
    copies, copies_at = next_count(), at
    at = at + copies
    outputs = next_arg()
  end
  outputs = tonumber(outputs)
  if accepted and not failure and copies > 0 then failure = resend_problem() end
  if accepted and not failure and ARGV[at + (outputs > 0 and outputs + 3 or 1)] == 'T' then failure = timer_problem() end
  if accepted and not failure and expiring then failure = expiry_problem() end
  if outputs > 0 then
    local key, maxlen = KEYS[next_count()], next_arg()
    for i = at + 1, accepted and at + outputs or at do add_output(key, maxlen, ARGV[i]) end
    at = at + outputs
  end
  local letters = next_arg()
  if letters == 'T' then
    for _ = 1, next_count() do
      local id, delay_ms, packed = next_arg(), next_arg(), next_arg()
      if accepted then change_timer(id, delay_ms, packed) end
    end
    letters = next_arg()
  end
  letters = tonumber(letters)
  for _ = 1, letters do
    local items = next_count()
    if accepted and not failure then
      if copies > 0 then
        add_dead_letter(at + 1, at + items)
      else
        try('XADD', KEYS[5], '*', unpack(ARGV, at + 1, at + items))
      end
    end
    at = at + items
  end
  if accepted then
    if value then
      try('HSET', KEYS[3], field, value)
    elseif expiring then
      set_expiring(field, unpack(expiring))
    elseif field then
      try('HDEL', KEYS[3], field)
    end
    for i = cleared_at + 1, cleared_at + cleared do try('HDEL', KEYS[4], ARGV[i]) end
    if from_queue then
      dequeue(offset_field, others_at, others, last, unfinished, has_more)
    else
      for i = others_at + 1, others_at + others do complete_entry(ARGV[i], 'i' .. ARGV[i], is_beyond(ARGV[i])) end
      complete_entry(last, offset_field, is_beyond(last))
    end
    if not failure then
      for i = copies_at + 1, copies_at + copies do end_resend(ARGV[i]) end -- last: what fails leaves the dead letter
      if up_to then
        cancel_rest(offset_field, cancels, last, up_to, committed_id)
      elseif cancels == '-' then
        end_cancellation(offset_field, last, committed_id)
      end
      committed, written, dead = committed + messages, written + outputs, dead + letters
      skipped = skipped + for_others
    end
  end
end

if committed > 0 then
  if max_offset then redis.call('HSET', KEYS[1], 'max_offset', max_offset) end
  redis.call('HINCRBY', KEYS[1], 'committed', committed)
end
if written > 0 then redis.call('HINCRBY', KEYS[1], 'written', written) end
if dead > 0 then redis.call('HINCRBY', KEYS[1], 'dead', dead) end
if skipped > 0 then redis.call('HINCRBY', KEYS[1], 'skipped', skipped) end
if #refused > 0 then redis.call('HINCRBY', KEYS[1], 'refused', #refused) end
release_leases()
notify_idle(#requeued)
if replay and not failure then redis.call('SET', replay, ARGV[4] .. ' ' .. table.concat(refused, ' '), 'EX', 3600) end
if failure then return failure end
if states_marked > 0 then drop_some_expired() end
return committed > 0 and (keyed or any_deferred) and with_lowest_pending(refused) or refused
