#!lua flags=no-writes
-- Count the entries of a stream after an id, up to another one, without sending them anywhere.
--
-- KEYS  1 the stream
-- ARGV  1 the id, not counted itself   2 how many to count at most, about   3 the last id to count ('+' = the end)
-- REPLY number of entries, id of the first ('' = none), id of the last ('' = none), 1 if there may be more
--
-- INVARIANT  One call stays short: it ends after about a million bytes of entries too, judged by samples.

local PAGE = 50
local MOST_BYTES = 1000000

local counted, bytes, first, last = 0, 0, '', ''
repeat
  local after = last == '' and ARGV[1] or last
  local page = redis.call('XRANGE', KEYS[1], '(' .. after, ARGV[3], 'COUNT', PAGE)
  if #page > 0 then
    counted = counted + #page
    if first == '' then first = page[1][1] end
    last = page[#page][1]
    for _, item in ipairs(page[1][2]) do
      bytes = bytes + PAGE * #item
    end
  end
until #page < PAGE or counted >= tonumber(ARGV[2]) or bytes >= MOST_BYTES
return {counted, first, last, counted % PAGE == 0 and counted > 0 and 1 or 0}
