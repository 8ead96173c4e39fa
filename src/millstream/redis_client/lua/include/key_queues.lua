-- The key queues of a handler: which entries wait for their key, and which worker leases it. KEYS as in commit.lua.
--
-- A key queue is named like an offset field: 'k' and the key, or 'i' and the id of an entry without a key, which has a
-- queue to itself. It is a list of ids in stream order, of entries that are enqueued and not committed; an empty queue
-- does not exist. Each queue is in exactly one of: ready (list), leases (sorted set, deadline in ms; owners has its
-- holder), backoff (sorted set, due in ms), parked (hash, the reason); except that a leased one may be parked as well,
-- from the end of its lease on.
local BASE = string.sub(KEYS[1], 1, -5) -- without 'meta'
local OWNERS, LEASES, READY = BASE .. 'owners', BASE .. 'leases', BASE .. 'ready'
local BACKOFF, PARKED, NOTIFY = BASE .. 'backoff', BASE .. 'parked', BASE .. 'notify'
local CANCELED = BASE .. 'canceled' -- hash: queues whose entries become dead letters without a run; see cancellation
local WAITING = 'waiting' -- the consumer of the entries that no worker has: in key queues and not leased, or nacked
local MAX_NOTIFIED, MAX_UNPACK = 16, 1000

local function queue_of(name)
  return BASE .. name .. ':queue'
end

-- The crash counts of an entry: deaths, failed attempts ('f'), since when ('s') and why the last one failed ('e'),
-- expired leases ('l') and, of a master, their causes ('c'), the isolated run under way ('a').
local function clear_crash_counts(id)
  redis.call('HDEL', KEYS[4], id, id .. 'f', id .. 's', id .. 'e', id .. 'l', id .. 'c', id .. 'a')
end

local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

-- Notify so many idle workers that queues are ready. A worker that cannot lease all of them notifies the next.
local function notify_idle(count)
  if count == 0 then return end
  local room = MAX_NOTIFIED - redis.call('LLEN', NOTIFY)
  for _ = 1, math.min(count, room) do redis.call('RPUSH', NOTIFY, '1') end
end

-- Make entries pending with `consumer`, where any tool can see who holds them.
local function assign_pending(group, consumer, ids)
  for i = 1, #ids, MAX_UNPACK do
    local last = math.min(i + MAX_UNPACK - 1, #ids)
    local claim = {KEYS[7], group, consumer, 0, unpack(ids, i, last)}
    claim[#claim + 1] = 'FORCE'
    claim[#claim + 1] = 'JUSTID'
    redis.call('XCLAIM', unpack(claim))
  end
end

-- Remove leases, with one command for many. The caller must move the queues elsewhere, unless they are empty.
local function end_leases(names)
  for i = 1, #names, MAX_UNPACK do
    local last = math.min(i + MAX_UNPACK - 1, #names)
    redis.call('HDEL', OWNERS, unpack(names, i, last))
    redis.call('ZREM', LEASES, unpack(names, i, last))
  end
end

-- Make the first entries of a queue pending with no worker any more.
local function unassign_pending(group, name, claimed)
  if claimed > 0 then assign_pending(group, WAITING, redis.call('LRANGE', queue_of(name), 0, claimed - 1)) end
end

local function end_lease(group, name, claimed)
  end_leases({name})
  unassign_pending(group, name, claimed)
end

-- Move a queue without a lease to the ready ones, unless it is parked; `first` before the others. True if it is ready.
local function make_ready(name, first)
  if redis.call('EXISTS', queue_of(name)) == 0 or redis.call('HEXISTS', PARKED, name) == 1 then return false end
  if first then redis.call('LPUSH', READY, name) else redis.call('RPUSH', READY, name) end
  return true
end

-- Whether there is any key queue where no worker has leased one: on Spark.
local function has_queues()
  return redis.call('EXISTS', PARKED, READY, BACKOFF) > 0
end

-- Whether new entries of a key have to wait: it is parked, or earlier entries wait already.
local function is_deferred(name)
  return redis.call('HEXISTS', PARKED, name) == 1 or redis.call('EXISTS', queue_of(name)) == 1
end

-- A queue that Spark runs stays ready until its last entry has left it. It is among the first ready ones.
local function drop_if_empty(name)
  if redis.call('EXISTS', queue_of(name)) == 0 then redis.call('LREM', READY, 1, name) end
end

-- Whether a queue is leased under this token, which lease_keys.lua returned.
local function holds_lease(name, token)
  return redis.call('HGET', OWNERS, name) == token
end

local function count_parked_entries()
  local count = 0
  for _, name in ipairs(redis.call('HKEYS', PARKED)) do count = count + redis.call('LLEN', queue_of(name)) end
  return count
end

-- The names of all key queues that have entries.
local function all_queues()
  local names = redis.call('LRANGE', READY, 0, -1)
  local owned, parked = redis.call('HKEYS', OWNERS), redis.call('HKEYS', PARKED)
  local backing_off = redis.call('ZRANGE', BACKOFF, 0, -1)
  for _, more in ipairs({owned, backing_off, parked}) do
    for _, name in ipairs(more) do names[#names + 1] = name end
  end
  return names
end

-- Make all queued entries pending with no worker.
local function unassign_all_queued(group)
  for _, name in ipairs(all_queues()) do assign_pending(group, WAITING, redis.call('LRANGE', queue_of(name), 0, -1)) end
end

-- An error if key queues have entries that a handler without a key cannot take over: parked ones, and those that wait
-- on Spark for the ones before them. Entries that workers have queued become incomplete again.
local function refuse_keyless(engine)
  local count = 0
  for _, name in ipairs(engine == 'keyed' and redis.call('HKEYS', PARKED) or all_queues()) do
    if string.sub(name, 1, 1) == 'k' or redis.call('HEXISTS', PARKED, name) == 1 then
      count = count + redis.call('EXISTS', queue_of(name))
    end
  end
  if count > 0 then return redis.error_reply('PARKED ' .. count) end
end

-- Drop the key queues that are not parked, and the parked ones as well unless they are kept.
local function drop_queues(keep_parked)
  for _, name in ipairs(all_queues()) do
    if not (keep_parked and redis.call('HEXISTS', PARKED, name) == 1) then redis.call('UNLINK', queue_of(name)) end
  end
  redis.call('UNLINK', OWNERS, LEASES, READY, BACKOFF, NOTIFY)
  if not keep_parked then redis.call('UNLINK', PARKED, CANCELED) end
end
