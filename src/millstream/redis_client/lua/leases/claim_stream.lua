#!lua flags=allow-oom
-- Claim one stream without an owner, whatever the share.
--
-- KEYS  1 the input stream   2 meta (hash)
-- ARGV  1 consumer group   2 consumer   3 its incarnation   4 stream
-- REPLY 'OK' and the lease as in leases/heartbeat.lua; 'UNKNOWN' if the stream is not announced, or its announcement is
--       unread; 'OWNED' and its owner; 'EVICTED' if the consumer is not registered under this incarnation, or its own
--       leases have expired: then those of others may have expired only because Redis was unavailable
--
-- INVARIANT  Of all consumers that claim a stream, one gets it. A repeated claim by the owner changes nothing.

-- include service_state

local group, consumer, stream = ARGV[1], ARGV[2], ARGV[4]

local function has_valid_leases(name)
  return tonumber(redis.call('ZSCORE', ALIVE, name) or 0) * 1000 > now_us()
end

if not is_registered(consumer, ARGV[3]) or not has_valid_leases(consumer) then return {'EVICTED'} end
if redis.call('HEXISTS', STREAMS, stream) == 0 then return {'UNKNOWN'} end
local owner, token = owner_of(stream)
if owner == consumer then
  return {'OK', lease_on(stream, token)}
end
if owner then
  if has_valid_leases(owner) then return {'OWNED', owner} end
  release(group, stream, owner, 'expired')
end
redis.call('LREM', UNASSIGNED, 1, stream)
return {'OK', assign(group, stream, consumer)}
