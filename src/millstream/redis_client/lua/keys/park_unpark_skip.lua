#!lua
-- Park a key queue, unpark it, or skip its first entry.
--
-- KEYS  as in commit.lua
-- ARGV  1 consumer group   2 name of the queue   3 'park', 'unpark' or 'skip'
--       4 the reason, for 'park'; the id of the first entry, for 'skip'   5.. items of its dead letter, for 'skip'
-- REPLY 1 if it was done, 0 if there was nothing to do: it is parked already, or not; or the entry is not the first
-- ERROR NOTKEYED when neither workers nor a Spark run of a handler with a key own the stream
--       NOGROUP when the group does not exist
--       MIGRATING when a queue is to be unparked that only the migration of its key keeps waiting
--
-- INVARIANT  A skipped entry becomes a dead letter in the same step. A worker that processes it is refused a late
--   commit, as its lease ends. A parked queue stays parked, and its reason then says that the entry was skipped: the next
--   one is not to blame. A queue that is parked while it is leased is kept from its next lease; on Spark, where
--   there are no leases, it is parked at once.

-- include ids
-- include refusal
-- include key_queues
-- include migration_state
-- include resent

local group, name, what = ARGV[1], ARGV[2], ARGV[3]
local found = redis.call('HMGET', KEYS[1], 'owner', 'keyed')
if found[1] ~= 'keyed' and (found[1] or not found[2]) then
  return redis.error_reply('NOTKEYED no handler with a key owns ' .. KEYS[7])
end
local leased = redis.call('HEXISTS', OWNERS, name) == 1

local moves = awaiting_text(name)
if moves and what == 'park' and redis.call('HGET', PARKED, name) == moves then
  redis.call('HSET', PARKED, name, now_ms() .. ' ' .. ARGV[4])
  return 1
end
if moves and what == 'unpark' then
  if redis.call('HGET', PARKED, name) == moves then return redis.error_reply('MIGRATING ' .. moves) end
  redis.call('HSET', PARKED, name, moves)
  return 1
end

if what == 'park' then
  if redis.call('HSETNX', PARKED, name, now_ms() .. ' ' .. ARGV[4]) == 0 then return 0 end
  redis.call('LREM', READY, 0, name)
  redis.call('ZREM', BACKOFF, name)
  return 1
end

if what == 'unpark' then
  if redis.call('HDEL', PARKED, name) == 0 then return 0 end
  local head = redis.call('LINDEX', queue_of(name), 0)
  if head then clear_crash_counts(head) end -- the operator's decision: it begins anew
  if not leased and make_ready(name, true) then notify_idle(1) end
  return 1
end

local probe = redis.pcall('XPENDING', KEYS[7], group, '-', '+', 1)
if probe.err then return named(probe, 'XPENDING', KEYS[7]) end
if redis.call('LINDEX', queue_of(name), 0) ~= ARGV[4] then return 0 end
local items = {unpack(ARGV, 5)}
keep_fields_before_edit(items)
redis.call('XADD', KEYS[5], '*', unpack(items)) -- first, as it may be refused
end_resend(ARGV[4])
redis.call('XACK', KEYS[7], group, ARGV[4])
redis.call('LPOP', queue_of(name))
clear_crash_counts(ARGV[4])
redis.call('HINCRBY', KEYS[1], 'committed', 1)
redis.call('HINCRBY', KEYS[1], 'dead', 1)
local parked = redis.call('HGET', PARKED, name)
local since, reason = string.match(parked and parked ~= moves and parked or '', '^(%d+) (.*)$')
if since then
  local text = ' message ' .. ARGV[4] .. ' was skipped, unpark the key to run the next one; before: '
  redis.call('HSET', PARKED, name, since .. text .. (string.match(reason, '^message %S+ was skipped.-; before: (.*)$') or reason))
end
local was_ready = redis.call('LREM', READY, 0, name)
redis.call('ZREM', BACKOFF, name)
if leased then end_lease(group, name, 1000) end
if make_ready(name, true) and was_ready == 0 then notify_idle(1) end
return 1
