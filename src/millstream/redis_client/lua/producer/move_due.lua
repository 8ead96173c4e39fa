#!lua
-- Move delayed messages that are due to the tail of their stream, in the order in which they are due.
--
-- KEYS  1 the stream   2 due (sorted set: id -> Unix ms; of timers with a fraction)
--       3 delayed (hash: id -> msgpack of its items)
-- ARGV  1 most messages   2 most bytes, about
-- REPLY number of messages moved, ms until the next one is due (0 = one is due now, -1 = none is left)
--
-- INVARIANT  A message leaves `due` and `delayed` if and only if its entry is added, by the server's clock alone. So
--   any number of movers may run at once and die at any point. Refused whole at maxmemory, before any write.

local call = redis.call

local found = call('TYPE', KEYS[1])['ok']
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. KEYS[1] .. ' holds a ' .. found .. ' where a stream is needed')
end
-- These remove nothing: a user who may not remove a message must not add its entry.
call('ZREM', KEYS[2], '')
call('HDEL', KEYS[3], '')

local now = call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local moved, bytes = 0, 0
for _, id in ipairs(call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now_ms), 'LIMIT', 0, ARGV[1])) do
  local packed = call('HGET', KEYS[3], id)
  if packed then -- otherwise it was deleted by hand
    call('XADD', KEYS[1], '*', unpack(cmsgpack.unpack(packed)))
    moved, bytes = moved + 1, bytes + #packed
  end
  call('ZREM', KEYS[2], id)
  call('HDEL', KEYS[3], id)
  if bytes >= tonumber(ARGV[2]) then break end
end

local next_one = call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
return {moved, next_one[2] and math.max(0, math.ceil(tonumber(next_one[2])) - now_ms) or -1}
