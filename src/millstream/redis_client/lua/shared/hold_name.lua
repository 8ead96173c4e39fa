#!lua flags=allow-oom
-- Acquire, renew or release a worker's name.
--
-- KEYS  1 the name (string: its holder, with a time to live)
-- ARGV  1 token of the holder   2 for how long, in milliseconds; 0 releases it
-- REPLY 1 if the holder has it (or had, and released it), 0 if another has
--
-- INVARIANT  At most one holder at a time has a name, as long as Redis' clock does not jump.

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
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
