#!lua
-- End a batch: everything up to an id is committed. Move the frontier there and drop the marks below it.
--
-- KEYS  1 meta (hash)   2 marks (hash)   3 strikes (hash)
-- ARGV  1 token: the run's epoch   2 id of the last entry of the batch
-- REPLY 1 if the frontier moved, 0 if it was there already
-- ERROR STALE when the token is older than the epoch
--
-- INVARIANT  The frontier never goes back, and marks are dropped only by the call that moves it past them.

local function split(id)
  return string.match(id, '^(%d+)-(%d+)$')
end

local function less_number(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

local found = redis.call('HMGET', KEYS[1], 'epoch', 'frontier')
if found[1] and less_number(ARGV[1], found[1]) then
  return redis.error_reply('STALE token ' .. ARGV[1] .. ' is older than epoch ' .. found[1])
end
if found[2] then
  local old_ms, old_seq = split(found[2])
  local new_ms, new_seq = split(ARGV[2])
  local ahead = less_number(old_ms, new_ms) or (old_ms == new_ms and less_number(old_seq, new_seq))
  if not ahead then return 0 end
end
redis.call('HSET', KEYS[1], 'frontier', ARGV[2])
redis.call('UNLINK', KEYS[2], KEYS[3])
return 1
