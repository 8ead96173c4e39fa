#!lua
-- Renew, revoke or end each lease that masters hold for consumers, by the state of the consumer.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 lease in milliseconds from now
--       4 maximum age of a lease in milliseconds, after which it is revoked
--       5 number of leases lost on one entry at which its key queue is parked (0 = never)
--       6 what the reason for that begins with; how often and why its leases were lost follows
-- REPLY number of renewed leases; ids of entries found acknowledged; then for each revoked lease: name of the key
--       queue, id of its first entry, holder, cause: 'unhealthy' (its health checks failed), 'registered' (it
--       registered again, as another process), 'stuck' (over age) or 'left' (it is not registered any more)
-- ERROR STALE when a newer run has taken over; NOGROUP when the group does not exist
--
-- INVARIANTS
--   A consumer in any language acknowledges with XACK and then calls a master; that call may be lost. So an entry that
--   was pending with its holder and is no longer pending is done. This is checked before a lease is revoked, in the
--   same script, so no acknowledged entry is assigned again.
--   A leased entry that another consumer has claimed is claimed back for its holder.
--   A leased entry that is pending with WAITING may be the next one of its key queue, while a master commits the one
--   before and ends the lease: it is claimed for the holder only if it is still so after UNOWNED_MS.
--   The script reads the registered consumers itself, so no master acts on an outdated list.
--   A consumer that has left did not die of its entry: that lease is not counted.

-- include ids
-- include key_queues
-- include group_state
-- include resent
-- include completed

local group, lease_ms, max_age_us = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]) * 1000
local UNOWNED, UNOWNED_MS = BASE .. 'unowned', 1000
local max_lost, reason_prefix = tonumber(ARGV[5]), ARGV[6]

local refusal = stale(ARGV[1], redis.call('HGET', KEYS[1], 'epoch'))
if refusal then return refusal end
local probe = redis.pcall('XPENDING', KEYS[7], group, '-', '+', 1)
if probe.err then return probe end

local registrations, exists = {}, {}
for name, text in pairs(to_map(redis.call('HGETALL', BASE .. 'consumers'))) do
  registrations[name] = cjson.decode(text)
end
for _, items in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[7], group)) do exists[to_map(items)['name']] = true end

local now = redis.call('TIME')
local now_us = now[1] * 1000000 + now[2]
local ms = math.floor(now_us / 1000)
local until_ms = ms + lease_ms
local unowned, remaining = to_map(redis.call('HGETALL', UNOWNED)), {}
local extended, done, revoked, ready = 0, {}, {}, 0

local function acknowledge(name, id, holder)
  if complete(group, name, id, holder) then ready = ready + 1 end
  done[#done + 1] = id
end

local COUNTED = {'unhealthy', 'registered', 'stuck'}
local WORDS = {
  unhealthy = 'failed health checks', registered = 'registration of a new process', stuck = 'over --delegation-limit'
}

-- How the holder's incarnation ended.
local function cause_of_end(holder, incarnation)
  local now = registrations[holder]
  if not now then return 'left' end
  return (now['ended'] or {})[incarnation] or (now['state'] == 'dead' and 'unhealthy' or 'registered')
end

-- Count a lost lease of an entry; return how many it has lost, and how many of them for which cause.
local function count_lost(id, why)
  local text = redis.call('HGET', KEYS[4], id .. 'c')
  local causes = text and cjson.decode(text) or {}
  causes[why] = (causes[why] or 0) + 1
  redis.call('HSET', KEYS[4], id .. 'c', cjson.encode(causes))
  return redis.call('HINCRBY', KEYS[4], id .. 'l', 1), causes
end

local function reason_of(lost, causes)
  local parts = {}
  for _, why in ipairs(COUNTED) do
    if causes[why] then parts[#parts + 1] = causes[why] .. ' x ' .. WORDS[why] end
  end
  return reason_prefix .. lost .. (lost == 1 and ' time: ' or ' times: ') .. table.concat(parts, ', ')
end

local function revoke(name, id, holder, why)
  local lost, causes = 0, {}
  if why ~= 'left' then lost, causes = count_lost(id, why) end
  end_lease(group, name, 1)
  if max_lost > 0 and lost >= max_lost then
    redis.call('HSETNX', PARKED, name, ms .. ' ' .. reason_of(lost, causes))
  elseif make_ready(name, true) then
    ready = ready + 1
  end
  revoked[#revoked + 1] = {name, id, holder, why}
end

local function claim_for(holder, token, id, is_unowned)
  local since = tonumber(unowned[token] or ms)
  if is_unowned and ms - since < UNOWNED_MS then
    remaining[token] = since
  else
    assign_pending(group, holder, {id})
  end
end

for name, token in pairs(to_map(redis.call('HGETALL', OWNERS))) do
  local fence, incarnation, holder = string.match(token, '^(%d+) (%S+) (.*)$')
  local head = redis.call('LINDEX', queue_of(name), 0)
  local item = head and redis.call('XPENDING', KEYS[7], group, head, head, 1)[1]
  if not head then
    end_lease(group, name, 0)
  elseif not item and exists[holder] then -- if the consumer is gone, XGROUP DELCONSUMER deleted its pending entries
    acknowledge(name, head, holder)
  elseif not registrations[holder] or registrations[holder]['incarnation'] ~= incarnation then
    revoke(name, head, holder, cause_of_end(holder, incarnation))
  elseif now_us - fence >= max_age_us then
    revoke(name, head, holder, 'stuck')
  else
    redis.call('ZADD', LEASES, 'XX', until_ms, name)
    extended = extended + 1
    if not item or item[2] ~= holder then claim_for(holder, token, head, item and item[2] == WAITING) end
  end
end
if next(unowned) then redis.call('UNLINK', UNOWNED) end
for token, since in pairs(remaining) do redis.call('HSET', UNOWNED, token, since) end
notify_idle(ready)
return {extended, done, unpack(revoked)}
