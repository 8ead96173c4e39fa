#!lua flags=allow-oom
-- Delete a consumer of a group once nothing is pending with it, after reassigning its entries, in one atomic step.
--
-- KEYS  1 the stream
-- ARGV  1 group   2 consumer   3 receiver ('' = none)   4 most entries to reassign   5 idle time it must have, in ms
-- REPLY outcome, entries reassigned, ids that were pending but are gone from the stream ...
--       outcome: deleted | more (call again) | absent | busy (not idle for so long) | pending (and no receiver) | no-receiver
--
-- INVARIANT  No entry that is pending with the consumer is dropped, except entries gone from the stream, and these are
--   named. Reassigned entries keep their idle time and delivery count. Frees memory, so maxmemory does not refuse it.

local stream, group, consumer, receiver = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local limit, min_idle = tonumber(ARGV[4]), tonumber(ARGV[5])
local pending = redis.call('XPENDING', stream, group, '-', '+', limit, consumer)
local found, receiver_found = nil, false
for _, item in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local info = {}
  for i = 1, #item, 2 do
    info[item[i]] = item[i + 1]
  end
  if info.name == consumer then
    found = info
  elseif info.name == receiver then
    receiver_found = true
  end
end
if not found then
  return {'absent', 0}
elseif found.idle < min_idle then
  return {'busy', 0}
elseif #pending > 0 and receiver == '' then
  return {'pending', found.pending}
elseif receiver ~= '' and not receiver_found then
  return {'no-receiver', 0}
end
local reply = {'deleted', 0}
for _, entry in ipairs(pending) do
  local claimed = redis.call('XCLAIM', stream, group, receiver, 0, entry[1], 'IDLE', entry[3], 'JUSTID')
  if #claimed > 0 then
    reply[2] = reply[2] + 1
  else
    reply[#reply + 1] = entry[1]
  end
end
if #pending == found.pending then
  redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
else
  reply[1] = 'more'
end
return reply
