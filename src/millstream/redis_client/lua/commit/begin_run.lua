#!lua
-- Begin to work on one stream for a run on Spark: raise the epoch to the run's token, so that older runs are refused.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the run's epoch   2 consumer group of the workers   3 '1' if the handler has a key
-- REPLY frontier ('' = none yet), number of entries that a task may have died of, floor ('' = none): up to it, entries that
--       are not open are done; 1 if there are lines, else 0
-- ERROR STALE when a newer run has raised the epoch further; NOPERM when a commit would be refused one of its writes;
--       PARKED when keys wait that are parked, and the handler has none
--
-- INVARIANT  The epoch never goes back. What workers did before is kept: everything up to the frontier is committed,
--   and what is committed beyond it has a mark, or lies below the floor and is not open. Lines that are parked stay, and
--   what is in them has a mark, or is not open, as if it was committed. `keyed` says that people may park keys.

-- include ids
-- include acl_probe
-- include key_queues
-- include group_state
-- include engine_takeover

local found = redis.call('HMGET', KEYS[1], 'epoch', 'frontier', 'engine', 'floor')
local epoch, frontier, engine, floor = found[1], found[2], found[3], found[4]
local function may_use_lines()
  return may('XACK', KEYS[7], ARGV[2], '0-0') or may('LTRIM', READY, '0', '-1') or may('LREM', READY, 1, '')
    or may('ZADD', BACKOFF, 'none', '')
end

local refusal = stale(ARGV[1], epoch) or may_commit() or may_use_lines() or (ARGV[3] == '' and needs_keys(engine))
if refusal then return refusal end
if epoch ~= ARGV[1] then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
  if ARGV[3] == '' then redis.call('HDEL', KEYS[1], 'keyed') else redis.call('HSET', KEYS[1], 'keyed', 1) end
end
if engine then
  frontier = take_over(ARGV[2], engine, frontier, ARGV[3] ~= '')
  floor = redis.call('HGET', KEYS[1], 'floor')
end

-- Beside these there is how often attempts failed, and leases were lost; and of what has survived, 0.
local struck = 0
for _, field in ipairs(redis.call('HKEYS', KEYS[4])) do
  if string.find(field, '%d$') and redis.call('HGET', KEYS[4], field) ~= '0' then struck = struck + 1 end
end
return {frontier or '', struck, floor or '', some_lines() and 1 or 0}
