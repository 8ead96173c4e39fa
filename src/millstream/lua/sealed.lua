-- What a partition had when it was sealed. KEYS as of commit.lua; needs ids.
--
-- Whether all up to `seal` is committed or in a line, where workers of keys are in charge. What was deleted before it was
-- routed needs no routing.
local function routed_to(seal)
  local found = redis.call('HMGET', KEYS[1], 'engine', 'frontier')
  local frontier = found[2]
  if found[1] ~= 'keyed' or not frontier then return false end
  return not less(frontier, seal) or #redis.call('XRANGE', KEYS[7], '(' .. frontier, seal, 'COUNT', 1) == 0
end
