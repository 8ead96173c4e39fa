#!lua flags=no-writes
-- Count the newest dead letters of a handler on a stream by their reason, without sending them anywhere.
--
-- KEYS  1 the stream of dead letters
-- ARGV  1 how many to count at most
-- REPLY reason, number, ... ; an entry without a reason has ''
--
-- INVARIANT  One call stays short: it ends after about a million bytes of letters too, judged by samples.

local PAGE = 50
local MOST_BYTES = 1000000

local counts, counted, bytes, last = {}, 0, 0, '+'
repeat
  local page = redis.call('XREVRANGE', KEYS[1], last, '-', 'COUNT', PAGE)
  for _, entry in ipairs(page) do
    local reason = ''
    for at = 1, #entry[2], 2 do
      if entry[2][at] == 'reason' then reason = entry[2][at + 1] end
    end
    counts[reason] = (counts[reason] or 0) + 1
  end
  counted = counted + #page
  if #page > 0 then
    last = '(' .. page[#page][1]
    for _, item in ipairs(page[1][2]) do
      bytes = bytes + PAGE * #item
    end
  end
until #page < PAGE or counted >= tonumber(ARGV[1]) or bytes >= MOST_BYTES
local reply = {}
for reason, count in pairs(counts) do
  reply[#reply + 1] = reason
  reply[#reply + 1] = count
end
return reply
