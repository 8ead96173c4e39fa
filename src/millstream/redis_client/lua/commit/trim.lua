#!lua flags=allow-oom
-- Remove the entries of a stream that none of its consumer groups needs any more.
--
-- KEYS  1 the stream
-- ARGV  1 most entries that are removed in one call   2 an id that is needed, with all after it, or ''
-- REPLY number of entries removed
--
-- INVARIANT  No entry is removed that a group has yet to deliver, or that is pending in one: the lowest of these
--   stays, and all after it. A handler on Spark shows its committed id as a group of its own. A stream without groups
--   is not trimmed.

-- include ids

if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local lowest
for _, items in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for i = 1, #items, 2 do group[items[i]] = items[i + 1] end
  local needed = group['last-delivered-id']
  if group['pending'] > 0 then
    local pending = redis.call('XPENDING', KEYS[1], group['name'])[2]
    if less(pending, needed) then needed = pending end
  end
  if not lowest or less(needed, lowest) then lowest = needed end
end
if not lowest then return 0 end
if ARGV[2] ~= '' and less(ARGV[2], lowest) then lowest = ARGV[2] end
return redis.call('XTRIM', KEYS[1], 'MINID', '~', lowest, 'LIMIT', ARGV[1])
