-- Insert an entry into a key queue at its place. Needs ids and key_queues.
local PAGE = 200

-- The first id in a queue, from an index on, that is newer than `id`.
local function newer_than(id, queue, at)
  while true do
    local page = redis.call('LRANGE', queue, at, at + PAGE - 1)
    for _, other in ipairs(page) do
      if less(id, other) then return other end
    end
    if #page < PAGE then return nil end
    at = at + PAGE
  end
end

-- How many first entries of a leased queue its worker has claimed with the lease.
local function count_claimed(group, queue)
  local count = 1
  while true do
    local id = redis.call('LINDEX', queue, count)
    local found = id and redis.call('XPENDING', KEYS[7], group, id, id, 1)[1]
    if not found or found[2] == WAITING then return count end
    count = count + 1
  end
end

-- Insert an entry before any newer one of its queue, but behind those that a worker has claimed. True if the queue is
-- ready for it and was not before.
local function insert_queued(group, name, id)
  local queue = queue_of(name)
  local leased = redis.call('HEXISTS', OWNERS, name) == 1
  local place = newer_than(id, queue, leased and count_claimed(group, queue) or 0)
  if place then
    redis.call('LINSERT', queue, 'BEFORE', place, id)
    return false
  end
  return redis.call('RPUSH', queue, id) == 1 and not leased and make_ready(name)
end
