#!lua flags=allow-oom
-- Set the idle time of a worker's entries: 0 renews the claim; more nacks them, so that other workers claim them once
-- that is their claim time.
--
-- KEYS  1 meta (hash)   2 the input stream
-- ARGV  1 token: the workers' epoch   2 consumer group   3 consumer   4 idle time in milliseconds   5.. entry ids
-- REPLY the ids that are not pending with the worker any more
-- ERROR STALE when a newer run has taken over
--
-- INVARIANT  Entries of another consumer are left alone: XCLAIM by itself would take them from the worker that claimed
--   them. A nacked entry is pending with the consumer of those that no worker has, so that nothing is pending with a
--   worker that has ended in order. A nack lowers the delivery count, which says how often a worker may have died of an
--   entry: this one did not.

-- include ids

local refusal = stale(ARGV[1], redis.call('HGET', KEYS[1], 'epoch'))
if refusal then return refusal end

local WAITING = 'waiting' -- the consumer of the entries that no worker has, as in key_queues
local group, consumer, idle_ms = ARGV[2], ARGV[3], ARGV[4]
local receiver = idle_ms == '0' and consumer or WAITING
local lost = {}
for i = 5, #ARGV do
  local id = ARGV[i]
  local held = redis.call('XPENDING', KEYS[2], group, id, id, 1, consumer)[1]
  local deliveries = held and (idle_ms == '0' and held[4] or math.max(0, held[4] - 1))
  -- XCLAIM removes an entry that was trimmed from the pending list.
  if not held or #redis.call('XCLAIM', KEYS[2], group, receiver, 0, id, 'IDLE', idle_ms, 'RETRYCOUNT', deliveries,
      'JUSTID') == 0 then
    lost[#lost + 1] = id
  end
end
return lost
