#!lua
-- Return which keys wait on Spark: later messages of them have to join their queues.
--
-- KEYS  as in commit.lua
-- ARGV  names of key queues
-- REPLY for each, 1 if it waits, else 0
--
-- INVARIANT  It only saves work: the commit and the deferral of a key check again whether it waits.

-- include key_queues

local found = {}
for i = 1, #ARGV do found[i] = is_deferred(ARGV[i]) and 1 or 0 end
return found
