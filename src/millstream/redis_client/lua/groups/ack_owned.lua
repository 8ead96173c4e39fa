#!lua flags=allow-oom
-- Acknowledge an entry, if it is pending with this consumer: XACK by itself does not check the consumer.
--
-- KEYS  1 the stream
-- ARGV  1 group   2 consumer   3 id
-- REPLY 1 if it was acknowledged, 0 if it is not pending with the consumer

if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2]) == 0 then return 0 end
return redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
