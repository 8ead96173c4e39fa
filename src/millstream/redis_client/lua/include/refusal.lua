-- Whether an error says that the user lacks a right: in the words of Redis 7.0, and in those of 7.2, 8 and Valkey.
local function denied(text)
  return text and (string.find(text, 'The user executing the script', 1, true)
    or string.find(text, 'ACL failure in script', 1, true))
end

-- The error of a redis.pcall, with the command and the key, which Redis leaves out.
local function named(reply, command, key)
  return redis.error_reply(reply.err .. ' (' .. command .. ' ' .. key .. ')')
end
