-- An error if the user may not let states expire in the way of this server. Needs acl_probe and field_expiry.
local function may_expire(key)
  if not can_fields_expire(key) then return may('HRANDFIELD', key, 1) end
  return may('HPEXPIRE', key, 1, 'FIELDS', 1, 'f') or may('HPEXPIREAT', key, 1, 'FIELDS', 1, 'f')
    or may('HPEXPIRETIME', key, 'FIELDS', 1, 'f')
end
