#!lua
-- Begin to work on one stream for a run on Spark: raise the epoch to the run's token, so that older runs are refused.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the run's epoch   2 consumer group of the workers
-- REPLY frontier ('' = none yet), number of struck entries, floor ('' = none): up to it, entries that are not open are done
-- ERROR STALE when a newer run has raised the epoch further; NOPERM when a commit would be refused one of its writes;
--       PARKED when workers have parked keys, which only they can wait with
--
-- INVARIANT  The epoch never goes back. What workers did before is kept: everything up to the frontier is committed,
--   and what is committed beyond it has a mark, or lies below the floor and is not open.

-- include ids
-- include rights
-- include lines
-- include group
-- include takeover

local found = redis.call('HMGET', KEYS[1], 'epoch', 'frontier', 'engine', 'floor')
local epoch, frontier, engine, floor = found[1], found[2], found[3], found[4]
local refusal = stale(ARGV[1], epoch) or may_commit() or (engine == 'keyed' and parked_lines())
if refusal then return refusal end
if epoch ~= ARGV[1] then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
end
if engine then
  frontier = take_over(ARGV[2], engine, frontier)
  floor = redis.call('HGET', KEYS[1], 'floor')
end
return {frontier or '', redis.call('HLEN', KEYS[4]), floor or ''}
