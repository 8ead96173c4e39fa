-- The state of a partition when it was closed. KEYS as in commit.lua; needs ids.
--
-- Whether all entries up to `close_id` are committed or in a key queue, where workers with a key own the stream, or a Spark
-- run has begun. Entries that were deleted before they were enqueued need no enqueueing.
local function is_enqueued_to(close_id)
  local found = redis.call('HMGET', KEYS[1], 'owner', 'committed_id', 'keyed')
  local committed_id = found[2]
  if not found[1] and found[3] then
    committed_id = committed_id or '0-0'
  elseif found[1] ~= 'keyed' then
    return false
  end
  if not committed_id then return false end
  return not less(committed_id, close_id) or #redis.call('XRANGE', KEYS[7], '(' .. committed_id, close_id, 'COUNT', 1) == 0
end
