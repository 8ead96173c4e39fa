#!lua flags=no-writes
-- Return the entries of a stream after an id, no more than a number of bytes.
--
-- KEYS  1 stream
-- ARGV  1 id   2 most entries   3 most bytes   4 '1' if one is wanted however large it is
-- REPLY size of the first entry that did not fit (0 = all did), the entries
--
-- INVARIANT  It reads a few at a time: Redis does not report the size of an entry beforehand.

-- include entry_sizes

local AT_ONCE = 16
local LAST = '18446744073709551615-18446744073709551615' -- Redis allows no id after it

local found, after, left, bytes = {}, ARGV[1], tonumber(ARGV[2]), 0
local max_bytes, is_one_wanted = tonumber(ARGV[3]), ARGV[4] == '1'
while left > 0 and after ~= LAST do
  local count = math.min(left, #found == 0 and 1 or AT_ONCE)
  local entries = redis.call('XRANGE', KEYS[1], '(' .. after, '+', 'COUNT', count)
  if #entries == 0 then break end
  for _, entry in ipairs(entries) do
    local size = size_of(entry)
    if bytes + size > max_bytes and not (is_one_wanted and #found == 0) then return {size, found} end
    found[#found + 1] = entry
    bytes = bytes + size
  end
  after = entries[#entries][1]
  left = left - #entries
end
return {0, found}
