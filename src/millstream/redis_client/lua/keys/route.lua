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
-- include routing

local group_name, most = ARGV[2], ARGV[4]
local progress, refusal = read_progress(ARGV[1], group_name)
if refusal then return refusal end
if progress.last ~= ARGV[3] then return {0, 0, progress.pending, progress.last} end

local room = room_of(progress, tonumber(most))
local first, full = 5, nil
if ARGV[5] == 'full' then first, full = 7, tonumber(ARGV[6]) end
for i = first, #ARGV, 2 do
  if progress.count >= room then break end
  note(progress, ARGV[i], ARGV[i + 1])
end
if progress.processed == 0 then return {0, 0, progress.pending, progress.last} end
local ready, pending = append_noted(progress, group_name, most, full)
return {progress.processed, ready, pending, progress.last}
