#!lua
-- Set a field of a hash, or remove it, if it still has the value that the caller has seen.
--
-- KEYS  1 the hash
-- ARGV  1 field   2 the value that was seen, '' = none   3 the new value, '' = remove the field
-- REPLY 1 if it was done, 0 if the field has another value now
--
-- INVARIANT  Of several callers that have seen the same value one succeeds.

if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return 1
