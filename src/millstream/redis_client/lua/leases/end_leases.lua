#!lua flags=allow-oom
-- End leases on streams: the streams are done, or released to other consumers.
--
-- KEYS  1 the input stream   2 meta (hash)
-- ARGV  1 consumer group   2 consumer, or '' for an operator   3 'done' or 'released'   4.. stream and token of each
--       lease (token '' for an operator)
-- REPLY streams that the consumer does not own under this token, or that the service does not know; these are unchanged
--
-- INVARIANT  Only the owner or an operator ends a lease. A repeated call changes nothing: a stream that is done
--   already, or was released under the same token, is not refused.

-- include service_state

local group, consumer, how = ARGV[1], ARGV[2], ARGV[3]
local refused = {}

-- Whether an earlier call, whose reply was lost, has ended the lease.
local function was_ended(stream, token, is_known)
  if how == 'done' then return not is_known end
  return redis.call('HGET', RELEASED, stream) == token
end

for i = 4, #ARGV, 2 do
  local stream = ARGV[i]
  local owner, token = owner_of(stream)
  local is_known = redis.call('HEXISTS', STREAMS, stream) == 1
  local may_end = owner == consumer and token == ARGV[i + 1]
  if consumer == '' then may_end = is_known end
  if may_end and how == 'done' then
    if owner then remove_owner(stream, owner) else redis.call('LREM', UNASSIGNED, 1, stream) end
    forget_stream(group, stream)
    emit('done', stream, owner or '')
  elseif may_end then
    if owner then release(group, stream, owner, 'released') end
    if consumer ~= '' then redis.call('HSET', RELEASED, stream, token) end
  elseif consumer == '' or not was_ended(stream, ARGV[i + 1], is_known) then
    refused[#refused + 1] = stream
  end
end
return refused
