#!lua
-- Record a firing of a schedule, and add its message to the stream.
--
-- KEYS  1 the stream   2 schedules (hash: schedule -> its record: last firing in Unix ms, and its rule)
--       3 the stream's `partition` (hash)
-- ARGV  1 the schedule   2 the record that was seen, '' = none   3 the new record   4 Unix ms of the firing
--       5.. items of the entry (name, value, ...); none = the firing has no message
-- REPLY 1 if it was done; 0 if the record is another one now, or the firing is not due by the server's clock
-- ERROR PARTITIONED: the stream is a partition, to which only its producers add
--
-- INVARIANT  The entry is added if and only if the record changes from the one that was seen, so of any number of
--   workers that try one adds it, and a copy of the call whose reply was lost adds nothing. Refused whole at maxmemory,
--   before any write.

local call = redis.call

local found = call('TYPE', KEYS[1])['ok']
if found ~= 'none' and found ~= 'stream' then
  return redis.error_reply('WRONGTYPE ' .. KEYS[1] .. ' holds a ' .. found .. ' where a stream is needed')
end
if call('HGET', KEYS[3], 'generation') then return redis.error_reply('PARTITIONED ' .. KEYS[1]) end
if (call('HGET', KEYS[2], ARGV[1]) or '') ~= ARGV[2] then return 0 end
local now = call('TIME')
if tonumber(ARGV[4]) > now[1] * 1000 + math.floor(now[2] / 1000) then return 0 end

if #ARGV > 4 then
  -- Changes nothing: a user who may not write the record must not add the entry.
  call('HSET', KEYS[2], ARGV[1], ARGV[2])
  call('XADD', KEYS[1], '*', unpack(ARGV, 5))
end
call('HSET', KEYS[2], ARGV[1], ARGV[3])
return 1
