#!lua
-- Ask whether a staged batch is to be published; if it is, note its seals, which are made next.
--
-- KEYS  1 record (hash: epoch, batch, state, attempt, manifest, withdrawn)   2 staged (set: token and stream)
-- ARGV  1 epoch of the run   2 number of the batch   3 'skip' or 'refuse' what comes before the last batch
--       4.. token and stream of each seal
-- REPLY 'go': it is   'done': it was   or 'decided' and a manifest: of a batch that is decided and not all published; end
--       that first, and ask again
-- ERROR STALE when a newer run has begun; BEHIND and the number of the last batch
--
-- INVARIANT  Like all that is staged, a seal is noted before it is made, or nobody would find it who sweeps up.

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
