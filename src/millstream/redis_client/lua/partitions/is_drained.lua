#!lua
-- Return whether all entries that a partition had when it was closed are committed; states may still be here.
--
-- KEYS  as in commit.lua
-- ARGV  1 the close id   2 consumer group
-- REPLY 1 if so, 0 if not
--
-- INVARIANT  Once it is so, it stays so.

-- include ids
-- include key_queues
-- include closed_state

local close_id = ARGV[1]
if not is_enqueued_to(close_id) then return 0 end
-- The usual case, at little cost; the pending entries are not always the queued ones.
local pending = redis.pcall('XPENDING', KEYS[7], ARGV[2], '-', close_id, 1)
if pending.err or #pending > 0 then return 0 end
for _, name in ipairs(all_queues()) do
  local first = redis.call('LINDEX', queue_of(name), 0)
  if first and not less(close_id, first) then return 0 end
end
for _, name in ipairs(redis.call('HKEYS', PARKED)) do
  if redis.call('EXISTS', queue_of(name)) == 0 then return 0 end
end
return 1
