-- A state that expires, as it is stored where the fields of a hash cannot expire: the byte C1, which begins no msgpack, when
-- it expires (Unix milliseconds), a space, and the state. delivery/state_expiry.py reads it, too.
local EXPIRY_MARK, MOST_DIGITS = '\193', 15

local function mark_expiry(state, expires_at)
  return EXPIRY_MARK .. string.format('%.0f', expires_at) .. ' ' .. state
end

-- The state without its expiry; nil if it has expired.
local function live_state(stored, ms)
  if string.sub(stored, 1, 1) ~= EXPIRY_MARK then return stored end
  local expires_at = string.match(string.sub(stored, 2, MOST_DIGITS + 2), '^(%d+) ')
  if not expires_at then return stored end -- it is damaged
  if tonumber(expires_at) > ms then return string.sub(stored, #expires_at + 3) end
end
