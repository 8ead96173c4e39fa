-- Messages that consumers of masters have done, and who did. KEYS as of commit.lua; needs lines.
--
-- The last ones are kept, so that a consumer which says so again is answered as before, and one that had lost the message
-- is not: between MOST_DONE and twice as many.
local DONE, DONE_BEFORE, MOST_DONE = BASE .. 'done', BASE .. 'done-before', 20000

local function note_done(id, consumer)
  redis.call('HSET', DONE, id, consumer)
  if redis.call('HLEN', DONE) >= MOST_DONE then
    redis.call('UNLINK', DONE_BEFORE)
    redis.call('RENAME', DONE, DONE_BEFORE)
  end
end

-- Who has done a message, if it is among the last.
local function done_by(id)
  return redis.call('HGET', DONE, id) or redis.call('HGET', DONE_BEFORE, id)
end

-- Take the first message out of its line, which its consumer has done. True if the next one can be taken now.
local function complete(group, name, id, consumer)
  redis.call('LPOP', line_of(name))
  forget_strikes(id)
  end_lease(group, name, 0)
  redis.call('HINCRBY', KEYS[1], 'committed', 1)
  note_done(id, consumer)
  return line_up(name)
end
