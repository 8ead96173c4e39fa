#!lua flags=allow-oom
-- End leases on streams: they are done, or others may have them.
--
-- KEYS  1 the input stream   2 meta (hash)
-- ARGV  1 consumer group   2 consumer, or '' for a person   3 'done' or 'released'   4.. stream and token of each lease
--       (token '' for a person)
-- REPLY streams that are not the consumer's under this token, or unknown to the service; nothing was changed of them
--
-- INVARIANT  Only the owner ends a lease, or a person. To repeat it changes nothing: what is done already, or was given
--   back under this very token, is not refused.

-- include service_state

local group, consumer, how = ARGV[1], ARGV[2], ARGV[3]
local refused = {}

-- Whether this was asked for before, and its reply lost.
local function was_ended(stream, token, is_known)
  if how == 'done' then return not is_known end
  return redis.call('HGET', RETURNED, stream) == token
end

for i = 4, #ARGV, 2 do
  local stream = ARGV[i]
  local owner, token = owner_of(stream)
  local is_known = redis.call('HEXISTS', STREAMS, stream) == 1
  local may_end = owner == consumer and token == ARGV[i + 1]
  if consumer == '' then may_end = is_known end
  if may_end and how == 'done' then
    if owner then let_go(stream, owner) else redis.call('LREM', FREE, 1, stream) end
    strike_off(group, stream)
    tell('done', stream, owner or '')
  elseif may_end then
    if owner then free(group, stream, owner, 'released') end
    if consumer ~= '' then redis.call('HSET', RETURNED, stream, token) end
  elseif consumer == '' or not was_ended(stream, ARGV[i + 1], is_known) then
    refused[#refused + 1] = stream
  end
end
return refused
