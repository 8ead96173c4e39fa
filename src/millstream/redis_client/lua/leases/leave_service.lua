#!lua flags=allow-oom
-- A consumer leaves: its streams are released at once, and its name may be used again.
--
-- KEYS  1 the input stream   2 meta (hash)
-- ARGV  1 consumer group   2 consumer   3 its incarnation   4 'released'; or, if its leases have expired before,
--       'expired', or 'lapsed' if that was because Redis was unavailable
-- REPLY number of streams that it had
--
-- INVARIANT  Only an announcement whose stream is done is acknowledged. A name that another process has acquired since
--   is left unchanged.

-- include service_state

local group, consumer = ARGV[1], ARGV[2]
if not is_registered(consumer, ARGV[3]) then return 0 end
local count = redis.call('SCARD', streams_of(consumer))
evict(group, consumer, ARGV[4], count)
emit('left', '', consumer)
return count
