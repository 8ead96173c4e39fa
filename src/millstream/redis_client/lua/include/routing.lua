-- The steps that append new entries of a stream to the queues of their keys. Needs ids, key_queues and group_state.

-- How far the stream is enqueued (`last`), how many entries are pending, and what is noted to be appended. Or nil, and an
-- error: a newer run has taken over, or the group or its progress is gone.
local function read_progress(token, group_name)
  local found = redis.call('HMGET', KEYS[1], 'epoch', 'max_offset', 'committed_id', 'takeover_offset')
  local refusal = stale(token, found[1])
  if refusal then return nil, refusal end
  local group = find_group(group_name)
  if not group then
    return nil, redis.error_reply('NOGROUP the group ' .. group_name .. ' of ' .. KEYS[7] .. ' is gone')
  end
  if not found[3] then
    return nil, redis.error_reply('NOGROUP the progress of the group ' .. group_name .. ' of ' .. KEYS[7] .. ' is gone')
  end
  local has_offsets = redis.call('EXISTS', KEYS[2]) == 1
  return {
    max_offset = found[2], last = found[3], takeover_offset = found[4],
    pending = group['pending'], entries_read = group['entries-read'],
    delivered_id = group['last-delivered-id'], has_offsets = has_offsets, may_be_done = found[4] or has_offsets,
    processed = 0, count = 0, ids = {}, queues = {}, order = {},
  }
end

-- How many more entries may be pending. If nothing can run, only the entries of parked queues may use up the room.
local function room_of(progress, most)
  if progress.pending >= most and redis.call('EXISTS', READY, OWNERS, BACKOFF) == 0 then
    progress.pending = math.min(progress.pending, count_parked_entries())
  end
  return most - progress.pending
end

local function is_done(progress, id, name)
  local takeover_offset = progress.takeover_offset
  if takeover_offset and not less(takeover_offset, id) and redis.call('HEXISTS', KEYS[6], id) == 0 then return true end
  if not progress.has_offsets then return false end
  local offsets = redis.call('HMGET', KEYS[2], name, 'i' .. id)
  return offsets[2] or (offsets[1] and not less(offsets[1], id))
end

-- Note the next entry of the stream, and its queue ('' = it is not for this handler). Most queues get one entry with a
-- call, which needs no table.
local function note(progress, id, name)
  progress.processed, progress.last = progress.processed + 1, id
  if name == '' or (progress.may_be_done and is_done(progress, id, name)) then return end
  local queues, count = progress.queues, progress.count + 1
  local noted = queues[name]
  if not noted then
    queues[name] = id
    progress.order[#progress.order + 1] = name
  elseif type(noted) == 'string' then
    queues[name] = {noted, id}
  else
    noted[#noted + 1] = id
  end
  progress.count, progress.ids[count] = count, id
end

-- Make a queue ready that waits for more entries, now that it has enough; not one that backs off after a failure.
local function end_wait(name)
  local head = redis.call('LRANGE', queue_of(name), '0', '0')[1]
  local counts = redis.call('HMGET', KEYS[4], head, head .. 'f', head .. 'l')
  if counts[1] or counts[2] or counts[3] then return false end
  return redis.call('ZREM', BACKOFF, name) == 1 and make_ready(name)
end

-- Set the group to the last entry that was noted.
local function set_position(progress, group_name)
  local read = progress.entries_read
  if read then
    redis.call('XGROUP', 'SETID', KEYS[7], group_name, progress.last, 'ENTRIESREAD', read + progress.processed)
  else
    redis.call('XGROUP', 'SETID', KEYS[7], group_name, progress.last)
  end
end

-- Move queues that were empty to the ready ones, unless they are leased or parked, with one command for many. Returns how
-- many are ready.
local function make_new_ready(names)
  local count, any_parked = 0, #names > 0 and redis.call('EXISTS', PARKED) == 1
  for from = 1, #names, MAX_UNPACK do
    local some = {unpack(names, from, math.min(from + MAX_UNPACK - 1, #names))}
    local owners = redis.call('HMGET', OWNERS, unpack(some))
    local parked = any_parked and redis.call('HMGET', PARKED, unpack(some)) or {}
    local ready = {}
    for i, name in ipairs(some) do
      if not owners[i] and not parked[i] then ready[#ready + 1] = name end
    end
    if #ready > 0 then redis.call('RPUSH', READY, unpack(ready)) end
    count = count + #ready
  end
  return count
end

-- Append the noted entries, make them pending, unless they are, and move the committed id. `full`: how many entries a
-- queue waits for at most, if queues do. Returns how many queues became ready, and how many entries are pending.
local function append_noted(progress, group_name, most, full, are_pending)
  local ready, new = 0, {}
  for _, name in ipairs(progress.order) do
    local some, length, added = progress.queues[name], 0, 1
    if type(some) == 'string' then
      length = redis.call('RPUSH', queue_of(name), some)
    else
      added = #some
      for i = 1, added, MAX_UNPACK do
        length = redis.call('RPUSH', queue_of(name), unpack(some, i, math.min(i + MAX_UNPACK - 1, added)))
      end
    end
    if length == added then
      new[#new + 1] = name
    elseif full and length >= full and end_wait(name) then
      ready = ready + 1
    end
  end
  ready = ready + make_new_ready(new)
  if not are_pending then assign_pending(group_name, WAITING, progress.ids) end
  set_position(progress, group_name)
  local last = progress.last
  redis.call('HSET', KEYS[1], 'committed_id', last, 'look_ahead', most)
  if progress.takeover_offset and not less(last, progress.takeover_offset) then
    redis.call('UNLINK', KEYS[6])
    redis.call('HDEL', KEYS[1], 'takeover_offset')
  end
  if progress.has_offsets and not (progress.max_offset and less(last, progress.max_offset)) then
    redis.call('UNLINK', KEYS[2])
    redis.call('HDEL', KEYS[1], 'max_offset')
  end
  notify_idle(ready)
  return ready, progress.pending + progress.count
end
