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

-- include ids
-- include key_queues
-- include group_state
-- include routing
-- include entry_sizes

local AT_ONCE, RESERVED = 16, 'millstream.'
local LAST = '18446744073709551615-18446744073709551615' -- Redis allows no id after it
local group_name, most, field = ARGV[2], ARGV[3], ARGV[4]
local progress, refusal = read_progress(ARGV[1], group_name)
if refusal then return refusal end

-- The last one, if the entry has several such fields. No queue without a key.
local function queue_in(items)
  if string.sub(items[1], 1, #RESERVED) == RESERVED then return nil end
  for i = #items - 1, 1, -2 do
    if items[i] == field then return items[i + 1] ~= '' and 'k' .. items[i + 1] or nil end
  end
end

local room, max_bytes = room_of(progress, tonumber(most)), tonumber(ARGV[6])
local left, bytes, is_for_caller = tonumber(ARGV[5]), 0, 0

local function note_all(entries)
  for _, entry in ipairs(entries) do
    local size = size_of(entry)
    if #progress.ids >= room or (progress.processed > 0 and bytes + size > max_bytes) then return false end
    local name = queue_in(entry[2])
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

-- A few at a time, since Redis does not report the size of an entry beforehand: as many as have room if they are as large as
-- those before. What is read and has no room would be read again.
while left > 0 and #progress.ids < room and bytes < max_bytes and progress.last ~= LAST do
  local fitting = progress.processed == 0 and 1 or (max_bytes - bytes) * progress.processed / math.max(1, bytes)
  local count = math.min(left, AT_ONCE, math.max(1, math.floor(fitting)))
  local entries = redis.call('XRANGE', KEYS[7], '(' .. progress.last, '+', 'COUNT', count)
  if #entries == 0 or not note_all(entries) then break end
end

local ready, pending = 0, progress.pending
if progress.processed > 0 then ready, pending = append_noted(progress, group_name, most, tonumber(ARGV[7])) end
return {progress.processed, ready, pending, progress.last, bytes, is_for_caller}
