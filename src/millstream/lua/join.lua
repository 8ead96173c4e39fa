#!lua
-- Join the workers of a handler on one stream; the first one takes the stream over from Spark, or begins it.
--
-- KEYS  as of commit.lua
-- ARGV  1 consumer group   2 where a handler begins that has done nothing yet: '0' (earliest) or '$' (latest)
-- REPLY epoch; 1 if the group was lost and has been made again, else 0
-- ERROR NOPERM when a commit would be refused one of its writes
--
-- INVARIANT  The epoch is raised when workers take over from Spark, so that a run that is still alive is refused, and by
--   nothing else that workers do. A lost group is made again where it stood: nothing is skipped, and what was
--   committed is known by the frontier, the open entries and the marks.

-- include ids
-- include rights
-- include group

local name, start = ARGV[1], ARGV[2]
local refusal = may_commit() or may('XACK', KEYS[7], name, '0-0')
if refusal then return refusal end

local found = redis.call('HMGET', KEYS[1], 'epoch', 'frontier', 'engine')
local epoch, frontier = found[1], found[2]
local group = find_group(name)
local lost = 0

if found[3] ~= 'workers' then
  local now = redis.call('TIME')
  local fresh = string.format('%d%06d', now[1], now[2])
  if epoch and not less_number(epoch, fresh) then
    fresh = string.format('%.0f', tonumber(epoch) + 1)
  end
  epoch = fresh
  if group then
    -- What workers read after Spark had taken over, Spark has done, or it lies beyond the frontier.
    delete_consumers(name)
  end
  if frontier and group then
    redis.call('XGROUP', 'SETID', KEYS[7], name, frontier)
  elseif not group then
    redis.call('XGROUP', 'CREATE', KEYS[7], name, frontier or start, 'MKSTREAM')
    if not frontier then
      frontier = find_group(name)['last-delivered-id']
      redis.call('HSET', KEYS[1], 'frontier', frontier)
    end
  end
  redis.call('HSET', KEYS[1], 'engine', 'workers', 'epoch', epoch)
elseif not group then
  remake_group(name, frontier)
  lost = 1
end
return {epoch, lost}
