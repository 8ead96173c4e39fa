#!lua
-- Enqueue entries that are pending, but in no key queue, into the queues of their keys.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3.. id and queue name of each entry
-- REPLY ids of those that were enqueued
-- ERROR STALE when a newer run has taken over; NOGROUP when the group does not exist
--
-- INVARIANTS  Entries beyond the committed id are left to the router, or they would be in their queue twice. An entry
--   comes before any newer one of its queue, but behind those that a worker has claimed with a lease.

-- include ids
-- include refusal
-- include key_queues
-- include queue_insert

local group = ARGV[2]
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'committed_id')
local refusal = stale(ARGV[1], meta[1])
if refusal then return refusal end

local enqueued, ready = {}, 0
for i = 3, #ARGV, 2 do
  local id, name = ARGV[i], ARGV[i + 1]
  local found = redis.pcall('XPENDING', KEYS[7], group, id, id, 1)
  if found.err then return named(found, 'XPENDING', KEYS[7]) end
  local is_new = meta[2] and less(meta[2], id)
  if #found > 0 and not is_new and not redis.call('LPOS', queue_of(name), id) then
    if insert_queued(group, name, id) then ready = ready + 1 end
    assign_pending(group, WAITING, {id})
    enqueued[#enqueued + 1] = id
  end
end
notify_idle(ready)
return enqueued
