#!lua
-- Join the workers of a handler on one stream; the first one takes the stream over from Spark, or begins it.
--
-- KEYS  as in commit.lua
-- ARGV  1 consumer group   2 where a handler without progress begins: '0' (earliest) or '$' (latest)
--       3 kind of workers: 'workers', which share the entries, or 'keyed', which share the key queues
--       4 the newest epoch that they take over from, or '' for any   5 '1' if the handler's states expire
--       6 number of the format that the caller knows
-- REPLY epoch; 1 if the group was lost and has been recreated, else 0
-- ERROR NOPERM when a commit would be refused one of its writes; STALE when a Spark run is newer than ARGV 4; PARKED
--       when there are parked keys, and these workers have no key; FORMAT when a newer version has stored the keys
--
-- INVARIANT  The epoch is raised when workers take over from Spark, or from workers of the other kind, so that those
--   still alive are refused, and by no other action of workers. A lost group is recreated at the committed id: nothing
--   is skipped, and committed entries are known by the committed id, the key queues, the incomplete entries and the
--   offsets. The key queues of Spark go on as they are.

-- include ids
-- include acl_probe
-- include field_expiry
-- include expiry_probe
-- include stored_format
-- include key_queues
-- include group_state
-- include engine_takeover

-- Entries up to the takeover offset are committed unless they are incomplete: workers that share entries begin there,
-- with the incomplete ones pending.
local function raise_to_takeover_offset(committed_id)
  local takeover_offset = redis.call('HGET', KEYS[1], 'takeover_offset')
  if not takeover_offset then return committed_id end
  for _, id in ipairs(redis.call('HKEYS', KEYS[6])) do
    local done = (committed_id and not less(committed_id, id)) or redis.call('HEXISTS', KEYS[2], 'i' .. id) == 1
    if done then redis.call('HDEL', KEYS[6], id) end
  end
  redis.call('HSET', KEYS[1], 'committed_id', takeover_offset)
  redis.call('HDEL', KEYS[1], 'takeover_offset')
  return takeover_offset
end

-- Entries that Spark has deferred for a handler without a key become incomplete: workers claim or read them.
local function make_deferred_incomplete(committed_id)
  for _, queue in ipairs(all_queues()) do
    for _, id in ipairs(redis.call('LRANGE', queue_of(queue), 0, -1)) do
      redis.call('HDEL', KEYS[2], queue)
      if committed_id and not less(committed_id, id) then
        redis.call('HSET', KEYS[6], id, WAITING)
      else
        clear_crash_counts(id)
      end
    end
  end
  drop_queues()
end

local name, start, kind = ARGV[1], ARGV[2], ARGV[3]
local found = redis.call('HMGET', KEYS[1], 'epoch', 'committed_id', 'owner', 'format')
local epoch, committed_id, owner = found[1], found[2], found[3]
local refusal = refuse_format(found[4], ARGV[6]) or may_commit() or may('XACK', KEYS[7], name, '0-0')
  or (ARGV[5] == '1' and may_expire(KEYS[3]))
if kind ~= 'keyed' and (owner == 'keyed' or not owner) then refusal = refusal or refuse_keyless(owner) end
if owner ~= kind and ARGV[4] ~= '' then refusal = refusal or stale(ARGV[4], epoch) end
if refusal then return refusal end

if owner and owner ~= kind then
  committed_id = take_over(name, owner, committed_id)
  owner = nil
end
local group = find_group(name)
local lost = 0

if owner ~= kind then
  local now = redis.call('TIME')
  local fresh = string.format('%d%06d', now[1], now[2])
  if epoch and not less_number(epoch, fresh) then
    fresh = string.format('%.0f', tonumber(epoch) + 1)
  end
  epoch = fresh
  -- A group that another program created keeps its pending entries, until masters bring them into key queues.
  if group and (committed_id or kind ~= 'keyed') then
    -- Entries that workers read after Spark had taken over are committed by Spark, or lie beyond the committed id.
    delete_consumers(name)
  end
  if kind == 'workers' then
    committed_id = raise_to_takeover_offset(committed_id)
    make_deferred_incomplete(committed_id)
    redis.call('HDEL', KEYS[1], 'keyed')
  end
  if committed_id and group then
    redis.call('XGROUP', 'SETID', KEYS[7], name, committed_id)
  elseif not group then
    redis.call('XGROUP', 'CREATE', KEYS[7], name, committed_id or start, 'MKSTREAM')
  end
  if not committed_id then redis.call('HSET', KEYS[1], 'committed_id', find_group(name)['last-delivered-id']) end
  if kind == 'workers' then claim_incomplete(name) else unassign_all_queued(name) end
  redis.call('HSET', KEYS[1], 'owner', kind, 'epoch', epoch)
elseif not group then
  recreate_group(name, committed_id, owner)
  lost = 1
end
if found[4] ~= ARGV[6] then redis.call('HSET', KEYS[1], 'format', ARGV[6]) end
return {epoch, lost}
