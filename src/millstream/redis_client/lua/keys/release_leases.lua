#!lua flags=allow-oom
-- Release leases of key queues: the queue may be leased again at once, later, or when an operator has acted.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group, then for each queue:
--         name, lease token, number of its entries that the worker has claimed and not committed
--         'requeue' (requeued), 'return' (not begun: requeued before the others), 'backoff' (backing off), 'limit'
--         (backing off until it may ask for a permit again), 'park', 'hold' (parked from the end of its lease on, which goes
--         on: its run cannot be ended), or 'move' (its one entry belongs into another queue)
--         milliseconds from now, for 'backoff'; the value of the limit's field, for 'limit'; the reason, for 'park' and 'hold';
--         the other queue's name, for 'move'; else ''
--         number of failed attempts on its first entry, '' if it was not attempted
--         why the last one failed: a line, then the traceback; '' if that is not known
-- REPLY lease tokens that held their queue no longer, of which nothing was changed
-- ERROR STALE when a newer run has taken over
--
-- INVARIANTS  A failed attempt keeps its place: the entry stays the first of its queue, and its attempts are counted.
--   An entry that is moved comes before any newer one of the other queue that no worker has claimed yet.

-- include ids
-- include refusal
-- include key_queues
-- include queue_insert
-- include failed_attempts
-- include limited_queues

local group = ARGV[2]
local refusal = stale(ARGV[1], redis.call('HGET', KEYS[1], 'epoch'))
if refusal then return refusal end
local probe = redis.pcall('XPENDING', KEYS[7], group, '-', '+', 1)
if probe.err then return named(probe, 'XPENDING', KEYS[7]) end

local refused, ready = {}, 0
local now = now_ms()
for i = 3, #ARGV, 7 do
  local name, token, claimed, how, detail, failed, last_error = unpack(ARGV, i, i + 6)
  if holds_lease(name, token) then
    if how ~= 'hold' then end_lease(group, name, tonumber(claimed)) end
    local head = redis.call('LINDEX', queue_of(name), 0)
    if head then
      if failed ~= '' then store_failed_attempts(head, failed, last_error) end
      if how == 'limit' then redis.call('HSETNX', KEYS[4], head .. 'f', 0) end -- it has waited, so it counts as read
      -- The process survived the run. If the entry was not begun, the isolation mark is of another run, which may have
      -- died of it.
      if how ~= 'return' then redis.call('HDEL', KEYS[4], head .. 'a') end
      if how == 'move' and redis.call('HEXISTS', PARKED, name) == 0 then
        redis.call('LREM', queue_of(name), 1, head)
        if insert_queued(group, detail, head) then ready = ready + 1 end
      elseif how == 'park' or how == 'hold' then
        redis.call('HSET', PARKED, name, now .. ' ' .. detail)
      elseif how == 'backoff' and redis.call('HEXISTS', PARKED, name) == 0 then
        redis.call('ZADD', BACKOFF, now + tonumber(detail), name)
        ready = ready + 1 -- not yet, but a notified worker learns when
      elseif how == 'limit' and redis.call('HEXISTS', PARKED, name) == 0 then
        redis.call('ZADD', BACKOFF, due_of_limited(detail, name, now), name)
        ready = ready + 1
      elseif make_ready(name, how == 'return') then
        ready = ready + 1
      end
    end
  else
    refused[#refused + 1] = token
  end
end
notify_idle(ready)
return refused
