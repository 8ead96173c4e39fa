-- Checks whether the user has the rights for the writes of a commit, and writes nothing: each command below is refused
-- by its own rules where the user's rights do not refuse it first. So a run without the rights stops before it begins.

-- include refusal
local function may(...)
  local reply = redis.pcall(...)
  -- Redis names neither the command nor the key in the refusal, so this does: HSET and the key, XGROUP and the
  -- subcommand.
  if denied(type(reply) == 'table' and reply.err) then
    return redis.error_reply('NOPERM ' .. select(1, ...) .. ' ' .. select(2, ...))
  end
end

local function may_write_hash(key)
  return may('HSET', key, 'f', 'v', 'odd') or may('HDEL', key, '') or may('HINCRBY', key, 'f', 'nan')
end

local function may_write_stream(key)
  return may('XADD', key, '0-0', 'f', 'v')
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
end
