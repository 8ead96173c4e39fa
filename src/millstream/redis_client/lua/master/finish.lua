#!lua flags=allow-oom
-- Finish messages that consumers have processed: acknowledge each and end its lease, which makes its key's next one ready.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group, then for each message: consumer, id, name of its key queue
-- REPLY number of ready key queues, then for each message 1 if this call finished it, 0 if the consumer has no lease
-- ERROR STALE when a newer run has taken over; NOGROUP when the group does not exist
--
-- INVARIANT  A consumer finishes only messages it holds a lease on: after a reassignment, only the new holder can.

-- include ids
-- include key_queues
-- include resent
-- include completed

local group = ARGV[2]
local refusal = stale(ARGV[1], redis.call('HGET', KEYS[1], 'epoch'))
if refusal then return refusal end
local probe = redis.pcall('XPENDING', KEYS[7], group, '-', '+', 1)
if probe.err then return probe end

local reply, ready = {0}, 0
for i = 3, #ARGV, 3 do
  local consumer, id, name = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local holder = string.match(redis.call('HGET', OWNERS, name) or '', '^%d+ %S+ (.*)$')
  if holder == consumer and redis.call('LINDEX', queue_of(name), 0) == id then
    redis.call('XACK', KEYS[7], group, id)
    if complete(group, name, id, consumer) then ready = ready + 1 end
    reply[#reply + 1] = 1
  else
    reply[#reply + 1] = 0
  end
end
notify_idle(ready)
reply[1] = redis.call('LLEN', READY)
return reply
