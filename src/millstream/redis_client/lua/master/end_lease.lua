#!lua flags=allow-oom
-- Acknowledge a message for a consumer that has no lease on it.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 consumer   4 id   5 name of its key queue, '' if unknown
-- REPLY outcome, and a consumer or '':
--         pending            it is pending: with that consumer, or '' if it is queued
--         acked              it was acknowledged with XACK without a lease; this call removed it from its key queue
--         acked-foreign      the consumer had read it from the group without a master; this call acknowledged it
--         done               it was done before, by that consumer
--         ended              it is in the stream and not pending: it was done long ago, or dead-lettered
--         new                it is in the stream, and not assigned to any consumer yet
--         unknown            it is not in the stream
-- ERROR STALE when a newer run has taken over; NOGROUP when the group does not exist
--
-- INVARIANT  An acknowledged entry ends the lease of the consumer that works on it: its work is done already.

-- include ids
-- include key_queues
-- include resent
-- include completed

local group, consumer, id, name = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'committed_id')
local refusal = stale(ARGV[1], meta[1])
if refusal then return refusal end
local found = redis.pcall('XPENDING', KEYS[7], group, id, id, 1)
if found.err then return found end
local holder = found[1] and found[1][2]
if holder and (holder ~= consumer or name == '' or redis.call('LPOS', queue_of(name), id)) then
  return {'pending', holder ~= WAITING and holder or ''}
elseif holder then
  redis.call('XACK', KEYS[7], group, id)
  store_completion(id, consumer)
  return {'acked-foreign', consumer}
end

local first = redis.call('LINDEX', queue_of(name), 0) == id
if redis.call('LREM', queue_of(name), 1, id) == 1 then
  clear_crash_counts(id)
  redis.call('HINCRBY', KEYS[1], 'committed', 1)
  store_completion(id, consumer)
  local leased = redis.call('HEXISTS', OWNERS, name) == 1
  if leased and first then
    end_lease(group, name, 0)
    if make_ready(name) then notify_idle(1) end
  elseif redis.call('EXISTS', queue_of(name)) == 0 then
    redis.call('LREM', READY, 0, name)
    redis.call('ZREM', BACKOFF, name)
  end
  return {'acked', consumer}
end

local by = completed_by(id)
if by then return {'done', by} end
if #redis.call('XRANGE', KEYS[7], id, id) == 0 then return {'unknown', ''} end
return {meta[2] and not less(meta[2], id) and 'ended' or 'new', ''}
