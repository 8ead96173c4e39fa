-- Ends the ownership of workers on a stream, before Spark or workers of another kind take over. KEYS as in commit.lua;
-- needs ids, group_state and key_queues.
--
-- Workers know the uncommitted entries by the pending list, workers with a key by the key queues, Spark by committed id
-- and offsets. So the committed id goes back to before the first uncommitted entry; entries up to the takeover offset
-- (`takeover_offset`) are committed unless they are incomplete.
local PAGE = 1000

local function store_pending(name, committed_id)
  local incomplete, from = {}, '-'
  repeat
    local page = redis.call('XPENDING', KEYS[7], name, from, '+', PAGE)
    local done = find_committed(page, committed_id) -- reads the incomplete entries stored so far
    for _, item in ipairs(page) do
      if not done[item[1]] then incomplete[#incomplete + 1] = item end
      from = '(' .. item[1]
    end
  until #page < PAGE
  redis.call('DEL', KEYS[6])
  for _, item in ipairs(incomplete) do redis.call('HSET', KEYS[6], item[1], item[2]) end
  return incomplete[1] and incomplete[1][1]
end

-- The offset of a key whose messages Spark has deferred covers them. They become incomplete again, and the entries
-- before them are committed.
local function lower_offset(name, head)
  local offset = redis.call('HGET', KEYS[2], name)
  if not offset or less(offset, head) then return end
  local before = string.sub(name, 1, 1) == 'k' and redis.call('XREVRANGE', KEYS[7], '(' .. head, '-', 'COUNT', 1)[1]
  if before then redis.call('HSET', KEYS[2], name, before[1]) else redis.call('HDEL', KEYS[2], name) end
end

local function store_queued(keep_parked)
  local first
  for _, name in ipairs(all_queues()) do
    local kept = keep_parked and redis.call('HEXISTS', PARKED, name) == 1
    local ids = kept and {} or redis.call('LRANGE', queue_of(name), 0, -1)
    for _, id in ipairs(ids) do redis.call('HSET', KEYS[6], id, WAITING) end
    if ids[1] then lower_offset(name, ids[1]) end
    if ids[1] and not (first and less(first, ids[1])) then first = ids[1] end
  end
  return first
end

-- Remove the incomplete entries up to `last`; return the first of the others.
local function drop_incomplete(last)
  local first
  for _, id in ipairs(redis.call('HKEYS', KEYS[6])) do
    if not less(last, id) then
      redis.call('HDEL', KEYS[6], id)
    elseif not (first and less(first, id)) then
      first = id
    end
  end
  return first
end

-- Store the incomplete entries; return the first of them, and the takeover offset.
local function store_incomplete(name, owner, committed_id, keep_parked)
  if owner ~= 'keyed' then
    local last = find_group(name)['last-delivered-id']
    -- A late, earlier Spark run may have set the group back.
    if committed_id and less(last, committed_id) then last = committed_id end
    return store_pending(name, committed_id), last
  end
  local takeover_offset = redis.call('HGET', KEYS[1], 'takeover_offset') or committed_id -- one that is not reached yet
  local not_enqueued = drop_incomplete(committed_id)
  return store_queued(keep_parked) or not_enqueued, takeover_offset
end

-- `keep_parked`: the new owner has key queues, and keeps those that are parked.
local function take_over(name, owner, committed_id, keep_parked)
  if not find_group(name) then recreate_group(name, committed_id, owner) end
  local first, takeover_offset = store_incomplete(name, owner, committed_id, keep_parked)
  if first then
    local before = redis.call('XREVRANGE', KEYS[7], '(' .. first, '-', 'COUNT', 1)[1]
    committed_id = before and before[1] or '0-0'
    redis.call('HSET', KEYS[1], 'takeover_offset', takeover_offset)
  else
    committed_id = takeover_offset
    redis.call('HDEL', KEYS[1], 'takeover_offset')
  end
  delete_consumers(name) -- their entries are beyond the committed id
  drop_queues(keep_parked)
  unassign_all_queued(name)
  redis.call('HSET', KEYS[1], 'committed_id', committed_id)
  redis.call('HDEL', KEYS[1], 'owner')
  return committed_id
end
