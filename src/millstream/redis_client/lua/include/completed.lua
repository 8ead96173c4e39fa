-- Messages that consumers of masters have completed, each with its consumer. KEYS as in commit.lua; needs key_queues and resent.
--
-- The last ones are kept, so that a consumer which reports one again gets the first reply, and a consumer that had lost
-- the message does not: between MOST_DONE and twice as many.
local DONE, DONE_BEFORE, MOST_DONE = BASE .. 'done', BASE .. 'done-before', 20000

local function store_completion(id, consumer)
  end_resend(id)
  redis.call('HSET', DONE, id, consumer)
  if redis.call('HLEN', DONE) >= MOST_DONE then
    redis.call('UNLINK', DONE_BEFORE)
    redis.call('RENAME', DONE, DONE_BEFORE)
  end
end

-- The consumer that completed a message, if it is among the last.
local function completed_by(id)
  return redis.call('HGET', DONE, id) or redis.call('HGET', DONE_BEFORE, id)
end

-- Remove the first message of a key queue, which its consumer has completed. True if the next one can be leased now.
local function complete(group, name, id, consumer)
  redis.call('LPOP', queue_of(name))
  clear_crash_counts(id)
  end_lease(group, name, 0)
  redis.call('HINCRBY', KEYS[1], 'committed', 1)
  store_completion(id, consumer)
  return make_ready(name)
end
