-- Checks whether the user has the rights for the writes of a commit, and writes nothing. So a run without the rights
-- stops before it begins.

-- An error if the user lacks the right to a command, with the command and the key, or XGROUP and the subcommand. Redis
-- itself compares the command with the user's rules: how it words a refusal depends on its version.
local function may(...)
  if not redis.acl_check_cmd(...) then
    return redis.error_reply('NOPERM ' .. select(1, ...) .. ' ' .. select(2, ...))
  end
end

local function may_write_hash(key)
  return may('HSET', key, 'f', 'v') or may('HDEL', key, 'f') or may('HINCRBY', key, 'f', 1)
end

local function may_write_stream(key)
  return may('XADD', key, '*', 'f', 'v')
end

-- KEYS as in commit.lua.
local function may_commit()
  for i = 1, #KEYS do
    local problem
    if i <= 4 or i == 6 then
      problem = may_write_hash(KEYS[i])
    elseif i ~= 7 then
      problem = may_write_stream(KEYS[i])
    end
    if problem then return problem end
  end
  return may('XDEL', KEYS[5], '0-0')
end
