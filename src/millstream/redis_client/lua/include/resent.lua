-- The edited copies of dead letters that are under way. KEYS as in commit.lua; needs key_queues.
--
-- `resent` has for each copy the id of its dead letter, and for each of these dead letters, after an 'l', the id of its
-- copy. A dead letter goes in the step that completes its copy. If the copy becomes a dead letter in its turn, that takes
-- the place of the one before, and keeps the fields that the message had before its edits.
local RESENT = BASE .. 'resent'

-- Add these fields to the items of a dead letter that is about to be written, the first of which is the id of its entry;
-- nothing if that is no edited copy, or if the dead letter before it was purged.
local function keep_fields_before_edit(items)
  local letter = redis.call('HGET', RESENT, items[2])
  if not letter then return end
  redis.call('XDEL', KEYS[5], '0-0') -- removes nothing: a user who may not remove the one before must not write the next
  local found = redis.call('XRANGE', KEYS[5], letter, letter)[1]
  local fields
  for i = 1, found and #found[2] or 0, 2 do
    if found[2][i] == 'before_edit' or (found[2][i] == 'fields' and not fields) then fields = found[2][i + 1] end
  end
  if fields then
    items[#items + 1] = 'before_edit'
    items[#items + 1] = fields
  end
end

-- Remove the dead letter of an entry that is completed, if that is the edited copy of one.
local function end_resend(copy)
  local letter = redis.call('HGET', RESENT, copy)
  if not letter then return end
  redis.call('XDEL', KEYS[5], letter)
  redis.call('HDEL', RESENT, copy, 'l' .. letter)
end
