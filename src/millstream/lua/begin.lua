#!lua
-- Begin to work on one stream for a run: raise the epoch to the run's token, so that older runs are refused.
--
-- KEYS  1 meta (hash)   2 marks (hash)   3 state (hash)   4 strikes (hash)   5 dead letters (stream)   6.. output streams
-- ARGV  1 token: the run's epoch
-- REPLY frontier ('' = none yet), number of struck entries
-- ERROR STALE when a newer run has raised the epoch further; NOPERM when a commit would be refused one of its writes
--
-- INVARIANT  The epoch never goes back. Writes nothing else: each command below is refused by its own rules where the
--   user's rights do not refuse it first, so that a run without the rights stops before it does anything.

local function less_number(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

local function may(...)
  local reply = redis.pcall(...)
  local text = type(reply) == 'table' and reply.err
  -- Redis names neither the command nor the key in the refusal, so we do.
  if text and string.find(text, 'The user executing the script', 1, true) then
    return 'NOPERM ' .. select(1, ...) .. ' on ' .. select(2, ...)
  end
end

for i = 1, #KEYS do
  local problem
  if i <= 4 then
    problem = may('HSET', KEYS[i], 'f', 'v', 'odd') or may('HDEL', KEYS[i], '') or may('HINCRBY', KEYS[i], 'f', 'nan')
  else
    problem = may('XADD', KEYS[i], '0-0', 'f', 'v')
  end
  if problem then return redis.error_reply(problem) end
end

local found = redis.call('HMGET', KEYS[1], 'epoch', 'frontier')
if found[1] and less_number(ARGV[1], found[1]) then
  return redis.error_reply('STALE token ' .. ARGV[1] .. ' is older than epoch ' .. found[1])
end
if found[1] ~= ARGV[1] then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
end
return {found[2] or '', redis.call('HLEN', KEYS[4])}
