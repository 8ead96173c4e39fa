#!lua
-- Return the key queues that Spark can run: they are neither parked nor backing off.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the run's epoch   2 consumer group of the workers   3 most queues
-- REPLY 1 if there are key queues at all, else 0; number of entries in them; how many queues wait for their key to
--       leave an earlier partition; milliseconds until a queue can be run that cannot yet (-1 = there is none); their
--       names
-- ERROR STALE when a newer run has taken over
--
-- INVARIANT  A queue stays ready until all of it is committed, or it waits again: a run that dies loses none. Queued
--   entries are pending, even after an operator has destroyed the group.

-- include ids
-- include key_queues
-- include group_state
-- include migration_state

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'committed_id')
local refusal = stale(ARGV[1], meta[1])
if refusal then return refusal end

local now, most = now_ms(), tonumber(ARGV[3])
local due = redis.call('ZRANGEBYSCORE', BACKOFF, '-inf', now, 'LIMIT', 0, most)
for _, name in ipairs(due) do
  make_ready(name) -- behind the others: keys that fail all the time must not starve them
  redis.call('ZREM', BACKOFF, name)
end
local first = redis.call('ZRANGE', BACKOFF, 0, 0, 'WITHSCORES')[2]
local wait_ms = first and math.max(0, tonumber(first) - now + 1) or -1
local some, entries = has_queues(), 0
if some and redis.call('EXISTS', KEYS[7]) == 1 then entries = keep_queued_pending(ARGV[2], meta[2]) end
return {some and 1 or 0, entries, redis.call('HLEN', AWAITING), wait_ms, unpack(redis.call('LRANGE', READY, 0, most - 1))}
