#!lua flags=no-writes
-- Return the names of all key queues that have entries.
--
-- KEYS  as in commit.lua
-- REPLY the names, some of them twice
--
-- INVARIANT  It is one step: a queue that changes its state meanwhile is not missed.

-- include key_queues

return all_queues()
