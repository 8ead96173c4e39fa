#!lua
-- Begin a Spark run on one stream: raise the epoch to the run's token, so that older runs are refused.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the run's epoch   2 consumer group of the workers   3 '1' if the handler has a key
--       4 '1' if its states expire   5 number of the format that the caller knows
-- REPLY committed id ('' = none yet), number of entries that a task may have died of, takeover offset ('' = none):
--       entries up to it are committed unless they are incomplete; 1 if there are key queues, else 0; the rate that an
--       operator has set ('' = none)
-- ERROR STALE when a newer run has raised the epoch further; NOPERM when a commit would be refused one of its writes;
--       PARKED when there are parked keys, and the handler has no key; FORMAT when a newer version has stored the keys
--
-- INVARIANT  The epoch never goes back. The progress of workers is kept: everything up to the committed id is
--   committed, and an entry committed beyond it has an offset, or lies below the takeover offset and is not incomplete.
--   Parked queues stay, and their entries have an offset, or are not incomplete, like committed ones. `keyed` says that
--   operators may park keys.

-- include ids
-- include acl_probe
-- include field_expiry
-- include expiry_probe
-- include stored_format
-- include key_queues
-- include group_state
-- include engine_takeover

local found = redis.call('HMGET', KEYS[1], 'epoch', 'committed_id', 'owner', 'takeover_offset', 'format', 'rate')
local epoch, committed_id, owner, takeover_offset = found[1], found[2], found[3], found[4]
local function may_use_queues()
  return may('XACK', KEYS[7], ARGV[2], '0-0') or may('LTRIM', READY, '0', '-1') or may('LREM', READY, 1, '')
    or may('ZADD', BACKOFF, 'none', '') or may('XGROUP', 'SETID', KEYS[7], ARGV[2], '0-0')
end

local refusal = refuse_format(found[5], ARGV[5]) or stale(ARGV[1], epoch) or may_commit() or may_use_queues()
  or (ARGV[4] == '1' and may_expire(KEYS[3])) or (ARGV[3] == '' and refuse_keyless(owner))
if refusal then return refusal end
if epoch ~= ARGV[1] then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'format', ARGV[5])
  if ARGV[3] == '' then redis.call('HDEL', KEYS[1], 'keyed') else redis.call('HSET', KEYS[1], 'keyed', 1) end
end
if owner then
  committed_id = take_over(ARGV[2], owner, committed_id, ARGV[3] ~= '')
  -- What is not committed waits, and must not be trimmed. A group that is there already keeps its count of entries.
  if find_group(ARGV[2])['last-delivered-id'] ~= committed_id then
    redis.call('XGROUP', 'SETID', KEYS[7], ARGV[2], committed_id)
  end
  takeover_offset = redis.call('HGET', KEYS[1], 'takeover_offset')
end

-- The other fields count failed attempts and expired leases; 0 is the count of an entry whose task has survived it.
local suspects = 0
for _, field in ipairs(redis.call('HKEYS', KEYS[4])) do
  if string.find(field, '%d$') and redis.call('HGET', KEYS[4], field) ~= '0' then suspects = suspects + 1 end
end
return {committed_id or '', suspects, takeover_offset or '', has_queues() and 1 or 0, found[6] or ''}
