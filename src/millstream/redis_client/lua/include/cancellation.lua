-- The cancellation of the rest of a key, of which a message has become a dead letter. Needs ids, refusal and key_queues.
--
-- `canceled` has the id of that message, and the last id that the stream had then: the entries of the key up to it become
-- dead letters without a run, whichever worker or task gets them. It stays until no more of them can come.
local SAMPLE = 3

-- The last id of the stream, or `last` if the stream is deleted. nil and an error if the user lacks a right that the
-- cancellation needs: so it is refused before anything is written.
local function last_id_of_stream(last)
  local probe = redis.pcall('HRANDFIELD', CANCELED, 1)
  if probe and probe.err then return nil, named(probe, 'HRANDFIELD', CANCELED) end
  if redis.call('EXISTS', KEYS[7]) == 0 then return last end
  local info = redis.pcall('XINFO', 'STREAM', KEYS[7])
  if info.err then return nil, named(info, 'XINFO STREAM', KEYS[7]) end
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
end

-- Whether no more entries up to `up_to` can come to a queue.
local function is_canceled_through(name, up_to, committed_id)
  local head = redis.call('LINDEX', queue_of(name), 0)
  if head then return less(up_to, head) end
  return committed_id and not less(committed_id, up_to)
end

-- The cancellation of a key without later messages stays: with each message that cancels others, some are checked.
local function drop_some_ended(committed_id)
  local some = redis.call('HRANDFIELD', CANCELED, SAMPLE, 'WITHVALUES')
  for i = 1, #some, 2 do
    local up_to = string.match(some[i + 1], ' (.*)$')
    if is_canceled_through(some[i], up_to, committed_id) then redis.call('HDEL', CANCELED, some[i]) end
  end
end

-- Cancel the entries of a key up to `up_to` that come after `last`, as its message `id` has become a dead letter.
local function cancel_rest(name, id, last, up_to, committed_id)
  if not less(last, up_to) or is_canceled_through(name, up_to, committed_id) then
    redis.call('HDEL', CANCELED, name)
  else
    redis.call('HSET', CANCELED, name, id .. ' ' .. up_to)
  end
  drop_some_ended(committed_id)
end

-- End the cancellation of a key if `last`, which is committed now, was the last entry that it concerns.
local function end_cancellation(name, last, committed_id)
  local stored = redis.call('HGET', CANCELED, name)
  local up_to = stored and string.match(stored, ' (.*)$')
  if up_to and (not less(last, up_to) or is_canceled_through(name, up_to, committed_id)) then
    redis.call('HDEL', CANCELED, name)
  end
end
