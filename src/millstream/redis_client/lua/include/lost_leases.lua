-- How a lease ends whose worker has died, or has lost it. Needs key_queues.

-- Count the loss against the first entry of the queue, which may have ended its worker, and end the lease. The queue
-- waits as after a failed attempt, or is ready before the others without `delay_ms`. A worker that gets an entry which
-- a process ran in isolation looks up how that process ended, and waits by itself. `together`: most entries of a queue
-- that a worker runs together. Any that it had claimed may have ended it, so each of them is leased alone from now on: a
-- count of 0 says so.
local function end_lost_lease(group, name, claimed, now, delay_ms, factor, max_ms, together)
  local head = redis.call('LINDEX', queue_of(name), 0)
  local lost = head and redis.call('HINCRBY', KEYS[4], head .. 'l', 1)
  for at = 1, together - 1 do
    local id = redis.call('LINDEX', queue_of(name), at)
    local found = id and redis.call('XPENDING', KEYS[7], group, id, id, 1)[1]
    if not found or found[2] == WAITING then break end
    redis.call('HSETNX', KEYS[4], id .. 'l', 0)
  end
  end_lease(group, name, claimed)
  local mark = delay_ms > 0 and head and redis.call('HGET', KEYS[4], head .. 'a')
  if not head or delay_ms == 0 or (mark and mark ~= '') then
    make_ready(name, true)
  elseif redis.call('HEXISTS', PARKED, name) == 0 then
    redis.call('ZADD', BACKOFF, now + math.floor(math.min(max_ms, delay_ms * factor ^ math.min(lost - 1, 64))), name)
  end
end

-- Whether a queue whose wait is over has waited for a lost lease, not for a failed attempt.
local function has_waited_for_loss(name)
  local head = redis.call('LINDEX', queue_of(name), 0)
  local counts = head and redis.call('HMGET', KEYS[4], head .. 'f', head .. 'l') or {}
  return counts[2] and not counts[1]
end
