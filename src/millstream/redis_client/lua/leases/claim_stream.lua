#!lua flags=allow-oom
-- Take one stream that nobody has, whatever the share.
--
-- KEYS  1 the input stream   2 meta (hash)
-- ARGV  1 consumer group   2 consumer   3 its incarnation   4 stream
-- REPLY 'OK' and the lease as of leases/heartbeat.lua; 'UNKNOWN' if it is not announced,
--       or its announcement is not read yet; 'OWNED' and by whom; 'GONE' if the consumer is not alive under this
--       incarnation, or its leases have ended: then those of others may have ended because Redis was away
--
-- INVARIANT  Of all who claim a stream, one gets it. To claim again what one has changes nothing.

-- include service_state

local group, consumer, stream = ARGV[1], ARGV[2], ARGV[4]

local function has_time(name)
  return tonumber(redis.call('ZSCORE', ALIVE, name) or 0) * 1000 > now_us()
end

if not is_alive(consumer, ARGV[3]) or not has_time(consumer) then return {'GONE'} end
if redis.call('HEXISTS', STREAMS, stream) == 0 then return {'UNKNOWN'} end
local owner, token = owner_of(stream)
if owner == consumer then
  return {'OK', lease_on(stream, token)}
end
if owner then
  if has_time(owner) then return {'OWNED', owner} end
  free(group, stream, owner, 'expired')
end
redis.call('LREM', FREE, 1, stream)
return {'OK', give(group, stream, consumer)}
