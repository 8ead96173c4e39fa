#!lua flags=no-writes
-- The entries of a stream after an id, no more than have room.
--
-- KEYS  1 stream
-- ARGV  1 id   2 most entries   3 most bytes   4 '1' if one is wanted however large it is
-- REPLY size of the entry that had no room any more (0 = all had), the entries
--
-- INVARIANT  A few are looked at at a time: Redis cannot say before how large the next ones are.

-- include entry_sizes

local AT_ONCE = 16
local LAST = '18446744073709551615-18446744073709551615' -- Redis knows of none behind it

local found, after, left, bytes = {}, ARGV[1], tonumber(ARGV[2]), 0
local most_bytes, is_one_wanted = tonumber(ARGV[3]), ARGV[4] == '1'
while left > 0 and after ~= LAST do
  local entries = redis.call('XRANGE', KEYS[1], '(' .. after, '+', 'COUNT', math.min(left, #found == 0 and 1 or AT_ONCE))
  if #entries == 0 then break end
  for _, entry in ipairs(entries) do
    local size = size_of(entry)
    if bytes + size > most_bytes and not (is_one_wanted and #found == 0) then return {size, found} end
    found[#found + 1] = entry
    bytes = bytes + size
  end
  after = entries[#entries][1]
  left = left - #entries
end
return {0, found}
