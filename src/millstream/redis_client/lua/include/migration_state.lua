-- Keys that move from one partition to another. KEYS as of commit.lua; needs lines.
--
-- A line whose key may not have left its earlier partition waits: `parked` says so, and `moving` has what it says there,
-- after a number that no other wait has. A person who parks such a line writes over the text in `parked`, not over that in
-- `moving`; so both have to let the line go.
local MOVING, MOVED = BASE .. 'moving', BASE .. 'moved'

-- What `parked` says of a line that only its move keeps; nil if it does not move.
local function moving_text(name)
  local found = redis.call('HGET', MOVING, name)
  return found and string.match(found, '^%d+ (.*)$')
end
