#!lua
-- Read whether a staged batch has to be published; if so, add its chunk counters, which are created next, to the index.
--
-- KEYS  1 record (hash: epoch, batch, state, attempt, manifest, withdrawn)   2 staged (set: token and stream)
-- ARGV  1 epoch of the run   2 number of the batch   3 'skip' or 'refuse' a batch before the last one
--       4.. token and stream of each chunk counter
-- REPLY 'go': publish it   'done': it was published   or 'decided' and the manifest of a batch that is decided and not
--       fully published: publish that one first, and call again
-- ERROR STALE when a newer run has begun; BEHIND with the number of the last batch
--
-- INVARIANT  Like every staged key, a chunk counter is indexed before it is created, so that a sweep finds it.

-- include ids

local found = redis.call('HMGET', KEYS[1], 'epoch', 'batch', 'state', 'manifest')
local batch = found[2]
local refusal = stale(ARGV[1], found[1])
if refusal then return refusal end
if found[3] == 'decided' then return {'decided', found[4]} end
if batch == ARGV[2] then return {'done'} end
if batch and less_number(ARGV[2], batch) then
  if ARGV[3] == 'skip' then return {'done'} end
  return redis.error_reply('BEHIND ' .. batch)
end
for i = 4, #ARGV do redis.call('SADD', KEYS[2], ARGV[i]) end
return {'go'}
