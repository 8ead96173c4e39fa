#!lua
-- Say which keys wait on Spark: what comes of them has to join their lines.
--
-- KEYS  as of commit.lua
-- ARGV  names of lines
-- REPLY for each, 1 if it waits, else 0
--
-- INVARIANT  It only saves work: whether a key waits is asked again when it commits, or is set aside.

-- include key_queues

local found = {}
for i = 1, #ARGV do found[i] = is_aside(ARGV[i]) and 1 or 0 end
return found
