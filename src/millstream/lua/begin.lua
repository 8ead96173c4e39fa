#!lua
-- Begin to work on one stream for a run on Spark: raise the epoch to the run's token, so that older runs are refused.
--
-- KEYS  as of commit.lua
-- ARGV  1 token: the run's epoch   2 consumer group of the workers
-- REPLY frontier ('' = none yet), number of struck entries
-- ERROR STALE when a newer run has raised the epoch further; NOPERM when a commit would be refused one of its writes
--
-- INVARIANT  The epoch never goes back. What workers did before is kept: everything up to the frontier is committed,
--   and what is committed beyond it has a mark.

-- include ids
-- include rights
-- include group

local CHUNK = 1000

-- Workers know what is not committed, by the pending list; Spark reads from the frontier on and leaves out what is
-- marked. So the frontier moves back to before the first pending entry, and what was acked after it gets marks.
local function take_over(name, frontier, top)
  local group = find_group(name)
  if not group then
    remake_group(name, frontier)
    group = find_group(name)
  end
  local last = group['last-delivered-id']
  -- An earlier run on Spark that was late may have set the group back.
  if frontier and less(last, frontier) then last = frontier end
  local pending, first = {}, nil
  local from = '-'
  repeat
    local page = redis.call('XPENDING', KEYS[7], name, from, '+', CHUNK)
    local done = find_done(page, frontier)
    for _, item in ipairs(page) do
      if not done[item[1]] then
        pending[item[1]] = true
        if not first then first = item[1] end
      end
      from = '(' .. item[1]
    end
  until #page < CHUNK
  if first then
    local before = redis.call('XREVRANGE', KEYS[7], '(' .. first, '-', 'COUNT', 1)[1]
    frontier = before and before[1] or '0-0'
    from = first
    repeat
      local page = redis.call('XRANGE', KEYS[7], from, last, 'COUNT', CHUNK)
      for _, entry in ipairs(page) do
        if not pending[entry[1]] then redis.call('HSET', KEYS[2], 'i' .. entry[1], entry[1]) end
        from = '(' .. entry[1]
      end
    until #page < CHUNK
    if not top or less(top, last) then redis.call('HSET', KEYS[1], 'top', last) end
  else
    frontier = last
  end
  delete_consumers(name) -- their entries are beyond the frontier
  redis.call('HSET', KEYS[1], 'frontier', frontier)
  redis.call('HDEL', KEYS[1], 'engine')
  redis.call('DEL', KEYS[6])
  return frontier
end

local found = redis.call('HMGET', KEYS[1], 'epoch', 'frontier', 'engine', 'top')
local epoch, frontier = found[1], found[2]
local refusal = stale(ARGV[1], epoch) or may_commit()
if refusal then return refusal end
if epoch ~= ARGV[1] then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
end
if found[3] == 'workers' then
  frontier = take_over(ARGV[2], frontier, found[4])
end
return {frontier or '', redis.call('HLEN', KEYS[4])}
