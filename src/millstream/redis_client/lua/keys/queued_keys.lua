#!lua flags=no-writes
-- Name all lines of a stream that have entries.
--
-- KEYS  as of commit.lua
-- REPLY the names, some of them twice
--
-- INVARIANT  It is one step: a line that goes from one place to another meanwhile is not missed.

-- include key_queues

return all_lines()
