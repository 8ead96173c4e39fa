-- Whether the server lets the fields of a hash expire (HPEXPIRE). A server that does not know a command raises an error
-- when it is to compare it with the user's rules.
local function can_fields_expire(key)
  return (pcall(redis.acl_check_cmd, 'HPEXPIRE', key, 1, 'FIELDS', 1, 'f'))
end
