#!lua
-- Claim the idle entries of other consumers in a group: one page of the pending list.
--
-- KEYS  1 stream   2 record (hash: epoch, token, batch, step, gone)
-- ARGV  1 epoch of the run   2 group   3 consumer that gets them   4 minimum idle time, in milliseconds
--       5 cursor, 0-0 = from the beginning   6 most entries
-- REPLY the next cursor, 0-0 at the end; how many were claimed; how many were found gone since the last report
-- ERROR STALE when a newer run owns the batches; NOGROUP when the group does not exist
--
-- INVARIANT  Redis removes entries that are no longer in the stream from the pending list when it finds them: they are
--   counted in the same step, so that a lost reply does not hide them.

-- include ids
-- include run_fence

local refusal = refuse_older(ARGV[1])
if refusal then return refusal end

local found = redis.call('XAUTOCLAIM', KEYS[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], 'COUNT', ARGV[6], 'JUSTID')
return {found[1], #found[2], redis.call('HINCRBY', KEYS[2], 'gone', #found[3])}
