#!lua flags=allow-oom
-- Acquire, renew or release a worker's name, or its router role on a stream.
--
-- KEYS  1 the name or the role (string: its holder, with a time to live)
--       2 optional: the drain of the worker (string: the holder that has to end it, a space, since when)
-- ARGV  1 token of the holder   2 for how long, in milliseconds; 0 releases it, with its drain
-- REPLY 1 if the holder has it (or had, and released it), 2 if it has it and has to end the worker, 0 if another has
--
-- Any caller may release with the holder's token: so a worker ends the router role of another, whose session has ended.
-- If a third one has the role by then, it has another token, and the call changes nothing.
--
-- INVARIANT  At most one holder at a time has a name or a role, as long as Redis' clock does not jump.

local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  -- No holder sets so long a time: the clock went back, with a failover for example.
  local held_ms = tonumber(ARGV[2])
  if held_ms > 0 and redis.call('PTTL', KEYS[1]) > held_ms then
    redis.call('PEXPIRE', KEYS[1], held_ms)
  end
  return 0
end
if ARGV[2] == '0' then
  redis.call('DEL', unpack(KEYS))
  return 1
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
-- A drain that names an earlier holder has no effect, nor has what another program has written there.
local drain = KEYS[2] and redis.pcall('GET', KEYS[2])
local token = ARGV[1] .. ' '
return type(drain) == 'string' and string.sub(drain, 1, #token) == token and 2 or 1
