-- An error if the server cannot let fields of a hash expire, or the user may not ask for it. A server that does not know
-- a command raises an error when it is to compare it with the user's rules.
-- Needs acl_probe.
local function may_expire(key)
  local known, problem = pcall(may, 'HPEXPIRE', key, 1, 'FIELDS', 1, 'f')
  if not known then return redis.error_reply('NOEXPIRY the server has no command HPEXPIRE') end
  return problem or may('HPEXPIREAT', key, 1, 'FIELDS', 1, 'f') or may('HPEXPIRETIME', key, 'FIELDS', 1, 'f')
end
