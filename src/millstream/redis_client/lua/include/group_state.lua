-- The consumer group of a handler on workers. KEYS as in commit.lua; needs key_queues.
local function to_map(items)
  local found = {}
  for i = 1, #items, 2 do found[items[i]] = items[i + 1] end
  return found
end

-- Also returns how many groups the stream has.
local function find_group(name)
  if redis.call('EXISTS', KEYS[7]) == 0 then return nil end
  local groups = redis.call('XINFO', 'GROUPS', KEYS[7])
  for _, items in ipairs(groups) do
    local group = to_map(items)
    if group['name'] == name then return group, #groups end
  end
end

-- Which entries of a page of the pending list are committed, by the rule of commit.lua. Such an entry was read once
-- more: by a worker that died before it saw the offset, or because a late Spark run had set the group back.
local function find_committed(page, committed_id)
  local names, done = {}, {}
  for i, item in ipairs(page) do names[i] = 'i' .. item[1] end
  local offsets = #page > 0 and redis.call('HMGET', KEYS[2], unpack(names))
  for i, item in ipairs(page) do
    local below = committed_id and not less(committed_id, item[1])
    done[item[1]] = offsets[i] or (below and redis.call('HEXISTS', KEYS[6], item[1]) == 0)
  end
  return done
end

-- Delete the consumers, and with them their pending entries.
local function delete_consumers(name)
  for _, items in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[7], name)) do
    redis.call('XGROUP', 'DELCONSUMER', KEYS[7], name, to_map(items)['name'])
  end
end

-- Make the incomplete entries pending, for workers to claim.
local function claim_incomplete(name)
  for _, id in ipairs(redis.call('HKEYS', KEYS[6])) do
    redis.call('XCLAIM', KEYS[7], name, 'recovered', 0, id, 'IDLE', 86400000, 'FORCE', 'JUSTID')
  end
end

-- Recreate a lost group at the committed id, with the entries before it that are still incomplete or queued. Incomplete
-- entries that workers with a key have not enqueued yet are not pending: they would use the room of the key queues.
local function recreate_group(name, committed_id, owner)
  redis.call('XGROUP', 'CREATE', KEYS[7], name, committed_id or '0', 'MKSTREAM')
  if owner == 'keyed' then unassign_all_queued(name) else claim_incomplete(name) end
end

-- On Spark no consumer reads through the group. If an operator has destroyed it, the driver shows it again as soon as
-- the committed id moves, but knows nothing of key queues: their entries have to be pending, or they would be trimmed.
-- Returns how many were pending.
local function keep_queued_pending(name, committed_id)
  local group = find_group(name)
  if not group then
    recreate_group(name, committed_id, 'keyed')
  elseif group['pending'] > 0 then
    return group['pending']
  elseif has_queues() then
    unassign_all_queued(name)
  end
  return 0
end
