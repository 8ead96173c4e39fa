-- Keys that migrate from one partition to another. KEYS as in commit.lua; needs key_queues.
--
-- A queue whose key may not have left its earlier partition waits: `parked` has the reason, and `awaiting` has the same
-- text, after a number that no other wait has. An operator who parks such a queue overwrites the text in `parked`, not
-- that in `awaiting`; so the queue is ready only when both the operator and the migration have released it.
local AWAITING, IMPORTED = BASE .. 'awaiting', BASE .. 'imported'

-- The text in `parked` of a queue that only its migration keeps waiting; nil if it does not migrate.
local function awaiting_text(name)
  local found = redis.call('HGET', AWAITING, name)
  return found and string.match(found, '^%d+ (.*)$')
end
