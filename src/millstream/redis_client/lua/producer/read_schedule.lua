#!lua
-- Read the record of a schedule, with the server's time.
--
-- KEYS  1 schedules (hash: schedule -> its record: last firing in Unix ms, and its rule)
-- ARGV  1 the schedule
-- REPLY the record, '' = none; the server's time in Unix ms

local now = redis.call('TIME')
return {redis.call('HGET', KEYS[1], ARGV[1]) or '', now[1] * 1000 + math.floor(now[2] / 1000)}
