#!lua flags=allow-oom
-- Deliver new entries of a stream to a consumer, no more than a number of bytes.
--
-- KEYS  1 stream
-- ARGV  1 group   2 consumer   3 most entries   4 most bytes
-- REPLY the id of each entry, and after it its names and values as a list
-- ERROR NOGROUP when the group does not exist
--
-- INVARIANT  Delivered entries are pending with the consumer, so it reads a few at a time, until the room is used up:
--   Redis does not report the size of an entry beforehand. If there are any, one is delivered, however large it is.

-- include entry_sizes

local AT_ONCE = 8

-- A list for each entry, as Redis has it, would cost a tenth of the script's time.
local delivered, count, left, bytes, step = {}, 0, tonumber(ARGV[3]), 0, 1
local max_bytes = tonumber(ARGV[4])
while left > 0 and (count == 0 or bytes < max_bytes) do
  local asked = math.min(left, step)
  local found = redis.pcall('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', asked, 'STREAMS', KEYS[1], '>')
  if found and found.err then return found end
  if not found then break end
  local entries = found[1][2]
  for i = 1, #entries do
    local entry = entries[i]
    count = count + 1
    delivered[2 * count - 1], delivered[2 * count] = entry[1], entry[2]
    bytes = bytes + size_of(entry)
  end
  if #entries < asked then break end
  left = left - #entries
  step = math.max(1, math.min(AT_ONCE, 2 * step, math.floor((max_bytes - bytes) * count / bytes)))
end
return delivered
