#!lua
-- Take an entry out of its line that a consumer has acknowledged with XACK when it had no lease on it any more.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the workers' epoch   2 consumer group   3 id   4 name of its line
-- REPLY 1 if it was done, 0 if the entry is pending, or in no line
-- ERROR STALE when a newer run has taken over; NOGROUP when the group is gone
--
-- INVARIANT  Who works on the entry by now loses its lease: what it does is done already.

-- include ids
-- include lines

local group, id, name = ARGV[2], ARGV[3], ARGV[4]
local refusal = stale(ARGV[1], redis.call('HGET', KEYS[1], 'epoch'))
if refusal then return refusal end
local found = redis.pcall('XPENDING', KEYS[7], group, id, id, 1)
if found.err then return found end
if #found > 0 then return 0 end

local first = redis.call('LINDEX', line_of(name), 0) == id
if redis.call('LREM', line_of(name), 1, id) == 0 then return 0 end
forget_strikes(id)
redis.call('HINCRBY', KEYS[1], 'committed', 1)
local leased = redis.call('HEXISTS', OWNERS, name) == 1
if leased and first then
  end_lease(group, name, 0)
  if line_up(name) then wake(1) end
elseif redis.call('EXISTS', line_of(name)) == 0 then
  redis.call('LREM', READY, 0, name)
  redis.call('ZREM', BACKOFF, name)
end
return 1
