#!lua flags=allow-oom
-- Store the progress of a handler's workers on one stream: a committed id, and the incomplete entries before it.
--
-- KEYS  as in commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 most pending entries that one checkpoint stores
-- REPLY 1 if it was stored, 0 if it is due later, since the last one is recent, -1 if too many entries are pending
-- ERROR STALE when a newer run has taken over
--
-- INVARIANT  An entry at or below the committed id is committed, or incomplete. So offsets, which every commit adds to,
--   can be dropped, and a lost group can be recreated without skipping or repeating an effect. Dropping offsets frees
--   more memory than the incomplete entries take: it may run at maxmemory.

-- include ids
-- include group_state

local CHUNK = 1000
-- Each pending entry costs the server some 4 us, and all workers call: together they use 4 % of its time.
local PAUSE_MS = 0.1

local name = ARGV[2]
local found = redis.call('HMGET', KEYS[1], 'epoch', 'committed_id', 'max_offset', 'checkpoint_at', 'owner')
local refusal = stale(ARGV[1], found[1])
if refusal then return refusal end
if found[5] == 'keyed' then return 1 end -- `route` stores it; entries that are incomplete here are not enqueued yet

local group, groups = find_group(name)
if not group then return redis.error_reply('NOGROUP the group ' .. name .. ' of ' .. KEYS[7] .. ' is gone') end
if group['pending'] > tonumber(ARGV[3]) then return -1 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local stored_at = tonumber(found[4] or 0)
-- A time in the future means that the clock went back.
local is_recent = stored_at <= now and now - stored_at < group['pending'] * PAUSE_MS
if is_recent and group['pending'] > CHUNK then return 0 end

local committed_id = group['last-delivered-id']
if found[2] and less(committed_id, found[2]) then committed_id = found[2] end
local incomplete, from = {}, '-'
repeat
  local page = redis.call('XPENDING', KEYS[7], name, from, '+', CHUNK)
  local done = find_committed(page, found[2])
  for _, item in ipairs(page) do
    if done[item[1]] then
      redis.call('XACK', KEYS[7], name, item[1])
    else
      incomplete[#incomplete + 1] = item[1]
      incomplete[#incomplete + 1] = item[2]
    end
    from = '(' .. item[1]
  end
until #page < CHUNK
redis.call('DEL', KEYS[6])
for i = 1, #incomplete, CHUNK do
  redis.call('HSET', KEYS[6], unpack(incomplete, i, math.min(i + CHUNK - 1, #incomplete)))
end
redis.call('HSET', KEYS[1], 'committed_id', committed_id, 'checkpoint_at', string.format('%.0f', now), 'groups', groups)
if not (found[3] and less(committed_id, found[3])) then redis.call('UNLINK', KEYS[2]) end
return 1
