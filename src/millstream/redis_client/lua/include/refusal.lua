-- The error of a redis.pcall, with the command and the key, which Redis leaves out.
local function named(reply, command, key)
  return redis.error_reply(reply.err .. ' (' .. command .. ' ' .. key .. ')')
end
