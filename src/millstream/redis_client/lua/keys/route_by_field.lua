#!lua
-- Append new entries of a stream to the queues of their keys, in stream order, and make them pending: where the key is the
-- value of a field, so that no entry has to be sent to a worker for it.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 most entries that may be pending   4 the field
--       5 most entries   6 most bytes of them, but one entry in any case
--       7 how many entries a queue waits for at most; absent where none waits for more
-- REPLY number of entries that were processed, number of queues that became ready, number pending, id up to which all
--       entries are enqueued now, bytes of these entries, 1 if the caller has to route the next one with route.lua: it
--       has no key, or a field of millstream comes first
-- ERROR STALE when a newer run has taken over; NOGROUP when the group does not exist
--
-- INVARIANTS  Those of route.lua. The entries are read in the same step, so they are those after the committed id.
--   Of those that are read, only the appended ones stay pending, and the group stays at the last of these.

-- include ids
-- include key_queues
-- include group_state
-- include routing

local AT_ONCE, RESERVED = 32, 'millstream.'
local LAST = '18446744073709551615-18446744073709551615' -- Redis allows no id after it
local group_name, most, field = ARGV[2], ARGV[3], ARGV[4]
local progress, refusal = read_progress(ARGV[1], group_name)
if refusal then return refusal end

local are_reserved = {}

local function is_reserved(name)
  if are_reserved[name] == nil then are_reserved[name] = string.sub(name, 1, #RESERVED) == RESERVED end
  return are_reserved[name]
end

-- The queue of an entry, by the last field of that name if it has several, and its size in bytes. No queue without a key.
local function queue_and_size(items)
  local key, size = '', 0
  for i = 1, #items, 2 do
    local name, value = items[i], items[i + 1]
    size = size + #name + #value
    if name == field then key = value end
  end
  return key ~= '' and not is_reserved(items[1]) and 'k' .. key or nil, size
end

local replies, read_count = {}, 0

-- Entries are read as those of the consumer that all waiting entries have, which makes them pending: that costs half as
-- much as to read them and to claim each.
local function read_new(count)
  if read_count == 0 and progress.delivered_id ~= progress.last then set_position(progress, group_name) end
  local found = redis.call('XREADGROUP', 'GROUP', group_name, WAITING, 'COUNT', count, 'STREAMS', KEYS[7], '>')
  local entries = found and found[1][2] or {}
  replies[#replies + 1], read_count = entries, read_count + #entries
  return entries
end

local room, max_bytes = room_of(progress, tonumber(most)), tonumber(ARGV[6])
local left, bytes, is_for_caller = tonumber(ARGV[5]), 0, 0

local function note_all(entries)
  for _, entry in ipairs(entries) do
    local name, size = queue_and_size(entry[2])
    if progress.count >= room or (progress.processed > 0 and bytes + size > max_bytes) then return false end
    if not name then
      is_for_caller = 1
      return false
    end
    note(progress, entry[1], name)
    bytes = bytes + size
  end
  left = left - #entries
  return true
end

-- What was read and is not appended must not be pending: it has no room yet, is for the caller, or is committed.
local function return_others()
  if read_count == progress.count then return end
  local others, at = {}, 1
  for _, entries in ipairs(replies) do
    for _, entry in ipairs(entries) do
      if entry[1] == progress.ids[at] then at = at + 1 else others[#others + 1] = entry[1] end
    end
  end
  for i = 1, #others, MAX_UNPACK do
    redis.call('XACK', KEYS[7], group_name, unpack(others, i, math.min(i + MAX_UNPACK - 1, #others)))
  end
  if progress.processed == 0 then set_position(progress, group_name) end
end

-- A few at a time, since Redis does not report the size of an entry beforehand: as many as have room if they are as large as
-- those before. What is read and has no room would be read again.
while left > 0 and progress.count < room and bytes < max_bytes and progress.last ~= LAST do
  local fitting = progress.processed == 0 and 1 or (max_bytes - bytes) * progress.processed / math.max(1, bytes)
  local count = math.min(left, AT_ONCE, math.max(1, math.floor(fitting)))
  local entries = read_new(count)
  if #entries == 0 or not note_all(entries) then break end
end

local ready, pending = 0, progress.pending
return_others()
if progress.processed > 0 then ready, pending = append_noted(progress, group_name, most, tonumber(ARGV[7]), true) end
return {progress.processed, ready, pending, progress.last, bytes, is_for_caller}
