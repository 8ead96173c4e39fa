#!lua
-- Propose a staged batch for publication: note which staged chunks it consists of, before any of them is kept for good.
--
-- KEYS  1 record (hash: epoch, batch, state, attempt, proposed, manifest)
-- ARGV  1 epoch of the run   2 number of the batch   3 attempt at it   4 manifest (msgpack)
--       5 attempt whose proposal this one replaces, or ''   6 'skip' or 'refuse' what comes before the last batch
-- REPLY 'go': noted   'done': the batch is published   or, with the manifest in question:
--       'decided': a batch is decided and not all published; end that first
--       'prepared': an attempt was proposed and not decided; drop what it has staged and propose again, naming it
-- ERROR STALE when a newer run has begun; BEHIND and the number of the last batch
--
-- INVARIANT  What is decided stays noted until all of it is published, so nothing comes before it or in its place.

-- include ids

local found = redis.call('HMGET', KEYS[1], 'epoch', 'batch', 'state', 'attempt', 'manifest')
local batch, state, attempt = found[2], found[3], found[4]
local refusal = stale(ARGV[1], found[1])
if refusal then return refusal end
if state == 'decided' then return {'decided', attempt, found[5]} end
if batch == ARGV[2] then return {'done'} end
if batch and less_number(ARGV[2], batch) then
  if ARGV[6] == 'skip' then return {'done'} end
  return redis.error_reply('BEHIND ' .. batch)
end
if state == 'prepared' and attempt ~= ARGV[3] and attempt ~= ARGV[5] then return {'prepared', attempt, found[5]} end
redis.call('HSET', KEYS[1], 'state', 'prepared', 'attempt', ARGV[3], 'proposed', ARGV[2], 'manifest', ARGV[4])
return {'go'}
