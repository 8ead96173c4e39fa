-- The format in which a handler's keys on a stream are stored: a number in meta. Code that knows earlier formats only
-- would misread the keys, so it must not begin. KEYS as in commit.lua.
local function refuse_format(stored, known)
  if stored and (tonumber(stored) or 0) > tonumber(known) then
    return redis.error_reply('FORMAT ' .. stored .. ' ' .. KEYS[7])
  end
end
