#!lua flags=allow-oom
-- A consumer leaves: others may have all its streams at once, and its name is free.
--
-- KEYS  1 the input stream   2 meta (hash)
-- ARGV  1 consumer group   2 consumer   3 its incarnation   4 'released', or if it comes too late, because it stood still,
--       'expired', or 'lapsed' because Redis was away
-- REPLY number of streams that it had
--
-- INVARIANT  Nothing is acknowledged that is not done. A name that another process has by now is left alone.

-- include service_state

local group, consumer = ARGV[1], ARGV[2]
if not is_alive(consumer, ARGV[3]) then return 0 end
local count = redis.call('SCARD', set_of(consumer))
bury(group, consumer, ARGV[4], count)
tell('left', '', consumer)
return count
