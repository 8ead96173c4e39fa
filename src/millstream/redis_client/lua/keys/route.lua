#!lua
-- Append new entries of a stream to the queues of their keys, in stream order, and make them pending.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 id that the caller has read the stream after
--       4 most entries that may be pending   5.. of each entry that it has read: id and queue name ('' = not for this
--       handler). Before them, where queues wait for more entries: 'full', and how many a queue waits for at most
-- REPLY number of entries that were processed, number of queues that became ready, number pending, id up to which all
--       entries are enqueued now
-- ERROR STALE when a newer run has taken over; NOGROUP when the group does not exist
--
-- INVARIANTS  Entries are enqueued once and in stream order, by any worker: the call does nothing unless the committed
--   id is where the caller has read from. Everything up to the committed id is committed or in a queue, wherever others
--   have set the group. Entries that Spark has committed beyond its committed id have an offset and are skipped.
--   Entries that other programs made pending do not use up the room for ever.

-- include ids
-- include key_queues
-- include group_state

local group_name, read_after, most = ARGV[2], ARGV[3], tonumber(ARGV[4])
local found = redis.call('HMGET', KEYS[1], 'epoch', 'max_offset', 'committed_id', 'takeover_offset')
local refusal = stale(ARGV[1], found[1])
if refusal then return refusal end
local group = find_group(group_name)
if not group then return redis.error_reply('NOGROUP the group ' .. group_name .. ' of ' .. KEYS[7] .. ' is gone') end
local last, takeover_offset, pending = found[3], found[4], group['pending']
if last ~= read_after then return {0, 0, pending, last} end
-- If nothing can run, only the entries of parked queues may use up the room.
if pending >= most and redis.call('EXISTS', READY, OWNERS, BACKOFF) == 0 then
  pending = math.min(pending, count_parked_entries())
end

local has_offsets = redis.call('EXISTS', KEYS[2]) == 1
local function is_done(id, name)
  if takeover_offset and not less(takeover_offset, id) and redis.call('HEXISTS', KEYS[6], id) == 0 then return true end
  if not has_offsets then return false end
  local offsets = redis.call('HMGET', KEYS[2], name, 'i' .. id)
  return offsets[2] or (offsets[1] and not less(offsets[1], id))
end

local processed, room = 0, most - pending
local order, queues, ids = {}, {}, {}
local first, full = 5, nil
if ARGV[5] == 'full' then first, full = 7, tonumber(ARGV[6]) end
for i = first, #ARGV, 2 do
  if #ids >= room then break end
  local id, name = ARGV[i], ARGV[i + 1]
  processed, last = processed + 1, id
  if name ~= '' and not is_done(id, name) then
    ids[#ids + 1] = id
    if not queues[name] then
      queues[name] = {}
      order[#order + 1] = name
    end
    table.insert(queues[name], id)
  end
end
if processed == 0 then return {0, 0, pending, last} end

-- Make a queue ready that waits for more entries, now that it has enough; not one that backs off after a failure.
local function end_wait(name)
  local head = redis.call('LRANGE', queue_of(name), '0', '0')[1]
  local counts = redis.call('HMGET', KEYS[4], head, head .. 'f', head .. 'l')
  if counts[1] or counts[2] or counts[3] then return false end
  return redis.call('ZREM', BACKOFF, name) == 1 and make_ready(name)
end

local ready = 0
for _, name in ipairs(order) do
  local some, length = queues[name], 0
  for i = 1, #some, MAX_UNPACK do
    length = redis.call('RPUSH', queue_of(name), unpack(some, i, math.min(i + MAX_UNPACK - 1, #some)))
  end
  if length == #some and redis.call('HEXISTS', OWNERS, name) == 0 and make_ready(name) then
    ready = ready + 1
  elseif full and length >= full and end_wait(name) then
    ready = ready + 1
  end
end
assign_pending(group_name, WAITING, ids)
local read = group['entries-read']
if read then
  redis.call('XGROUP', 'SETID', KEYS[7], group_name, last, 'ENTRIESREAD', read + processed)
else
  redis.call('XGROUP', 'SETID', KEYS[7], group_name, last)
end
redis.call('HSET', KEYS[1], 'committed_id', last, 'look_ahead', ARGV[4])
if takeover_offset and not less(last, takeover_offset) then
  redis.call('UNLINK', KEYS[6])
  redis.call('HDEL', KEYS[1], 'takeover_offset')
end
if has_offsets and not (found[2] and less(last, found[2])) then
  redis.call('UNLINK', KEYS[2])
  redis.call('HDEL', KEYS[1], 'max_offset')
end
notify_idle(ready)
return {processed, ready, pending + #ids, last}
