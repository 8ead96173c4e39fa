#!lua
-- Tend the leases that masters took in the name of consumers: keep, take back or end each, by what is known of its holder.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 lease in milliseconds from now
--       4 most milliseconds from a lease's beginning until it is not extended any more
--       5 number of leases lost on one entry with which its line is parked (0 = never)   6 the reason for that
-- REPLY number of leases that were extended; ids that count as acknowledged; then for each lease that was taken back: name of
--       the line, id of its first entry, holder, 'gone' (not registered, or another life of it) or 'stuck' (over time)
-- ERROR STALE when a newer run has taken over; NOGROUP when the group is gone
--
-- INVARIANTS  A consumer in any language acknowledges with XACK and then tells a master, which may never hear of it: so
--   what was pending with a holder and is not any more is done. That is looked at before a lease is taken back, in the same
--   step, so that nothing is given out again that was acknowledged. An entry of a lease that somebody else has claimed
--   goes back to its holder. One that nobody has may be the next in line, while a master commits the one before and
--   ends the lease: it goes to the holder only if it stays so. The registered consumers are read here, so that masters
--   never judge by an old list.

-- include ids
-- include key_queues
-- include group_state
-- include completed

local group, lease_ms, longest_us = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]) * 1000
local STRAYS, STRAY_MS = BASE .. 'strays', 1000
local most_lost, reason = tonumber(ARGV[5]), ARGV[6]

local refusal = stale(ARGV[1], redis.call('HGET', KEYS[1], 'epoch'))
if refusal then return refusal end
local probe = redis.pcall('XPENDING', KEYS[7], group, '-', '+', 1)
if probe.err then return probe end

local lives, exists = {}, {}
for name, text in pairs(pairs_of(redis.call('HGETALL', BASE .. 'consumers'))) do
  lives[name] = cjson.decode(text)['incarnation']
end
for _, items in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[7], group)) do exists[pairs_of(items)['name']] = true end

local now = redis.call('TIME')
local now_us = now[1] * 1000000 + now[2]
local ms = math.floor(now_us / 1000)
local until_ms = ms + lease_ms
local strays, still = pairs_of(redis.call('HGETALL', STRAYS)), {}
local extended, done, back, ready = 0, {}, {}, 0

local function acknowledge(name, id, holder)
  if complete(group, name, id, holder) then ready = ready + 1 end
  done[#done + 1] = id
end

local function take_back(name, id, holder, why)
  local lost = redis.call('HINCRBY', KEYS[4], id .. 'l', 1)
  end_lease(group, name, 1)
  if most_lost > 0 and lost >= most_lost then
    redis.call('HSETNX', PARKED, name, ms .. ' ' .. reason)
  elseif line_up(name, true) then
    ready = ready + 1
  end
  back[#back + 1] = {name, id, holder, why}
end

local function give(token, holder, id, is_nobodys)
  local since = tonumber(strays[token] or ms)
  if is_nobodys and ms - since < STRAY_MS then
    still[token] = since
  else
    hold_by(group, holder, {id})
  end
end

for name, token in pairs(pairs_of(redis.call('HGETALL', OWNERS))) do
  local fence, life, holder = string.match(token, '^(%d+) (%S+) (.*)$')
  local head = redis.call('LINDEX', line_of(name), 0)
  local item = head and redis.call('XPENDING', KEYS[7], group, head, head, 1)[1]
  if not head then
    end_lease(group, name, 0)
  elseif not item and exists[holder] then -- without its consumer, the entry was deleted with it
    acknowledge(name, head, holder)
  elseif lives[holder] ~= life then
    take_back(name, head, holder, 'gone')
  elseif now_us - fence >= longest_us then
    take_back(name, head, holder, 'stuck')
  else
    redis.call('ZADD', LEASES, 'XX', until_ms, name)
    extended = extended + 1
    if not item or item[2] ~= holder then give(token, holder, head, item and item[2] == WAITING) end
  end
end
if next(strays) then redis.call('UNLINK', STRAYS) end
for stray, since in pairs(still) do redis.call('HSET', STRAYS, stray, since) end
wake(ready)
return {extended, done, unpack(back)}
