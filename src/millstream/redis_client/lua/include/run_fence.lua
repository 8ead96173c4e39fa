-- Only the newest run may change the batches of a group. KEYS 2 is its record; needs ids.
local function refuse_older(epoch)
  local newest = redis.call('HGET', KEYS[2], 'epoch')
  if newest ~= epoch then
    local refusal = stale(epoch, newest or nil)
    if refusal then return refusal end
    redis.call('HSET', KEYS[2], 'epoch', epoch)
  end
end
