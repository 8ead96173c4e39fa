#!lua
-- Cancel delayed messages that have not been moved to their stream yet.
--
-- KEYS  1 due (sorted set: id -> Unix ms)   2 delayed (hash: id -> msgpack of its items)
-- ARGV  ids
-- REPLY how many of them were still delayed
--
-- INVARIANT  A message is either moved or cancelled, never both, and leaves both keys together.

local cancelled = 0
for _, id in ipairs(ARGV) do
  cancelled = cancelled + redis.call('ZREM', KEYS[1], id)
  redis.call('HDEL', KEYS[2], id)
end
return cancelled
