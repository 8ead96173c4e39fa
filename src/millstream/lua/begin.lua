#!lua
-- Begin to work on one stream for a run: raise the epoch to the run's token, so that older runs are refused.
--
-- KEYS  1 meta (hash)   2 strikes (hash)
-- ARGV  1 token: the run's epoch
-- REPLY frontier ('' = none yet), number of struck entries
-- ERROR STALE when a newer run has raised the epoch further
--
-- INVARIANT  The epoch never goes back.

local function less_number(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

local found = redis.call('HMGET', KEYS[1], 'epoch', 'frontier')
if found[1] and less_number(ARGV[1], found[1]) then
  return redis.error_reply('STALE token ' .. ARGV[1] .. ' is older than epoch ' .. found[1])
end
if found[1] ~= ARGV[1] then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
end
return {found[2] or '', redis.call('HLEN', KEYS[2])}
