-- What a partition had when it was sealed. KEYS as of commit.lua; needs ids.
--
-- Whether all up to `seal` is committed or in a line, where workers of keys are in charge, or a run on Spark has begun. What
-- was deleted before it was routed needs no routing.
local function routed_to(seal)
  local found = redis.call('HMGET', KEYS[1], 'engine', 'frontier', 'keyed')
  local frontier = found[2]
  if not found[1] and found[3] then frontier = frontier or '0-0' elseif found[1] ~= 'keyed' then return false end
  if not frontier then return false end
  return not less(frontier, seal) or #redis.call('XRANGE', KEYS[7], '(' .. frontier, seal, 'COUNT', 1) == 0
end
