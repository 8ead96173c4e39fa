-- The end of workers' time on a stream, before Spark or workers of another kind come. KEYS as of commit.lua; needs ids,
-- group and lines.
--
-- Workers know what is not committed by the pending list, those of keys by the lines, the others by frontier and marks.
-- So the frontier goes back to before the first entry that is not committed; entries up to `floor` are done unless they
-- are open.
local PAGE = 1000

local function note_pending(name, frontier)
  local open, from = {}, '-'
  repeat
    local page = redis.call('XPENDING', KEYS[7], name, from, '+', PAGE)
    local done = find_done(page, frontier) -- it looks at what was open so far
    for _, item in ipairs(page) do
      if not done[item[1]] then open[#open + 1] = item end
      from = '(' .. item[1]
    end
  until #page < PAGE
  redis.call('DEL', KEYS[6])
  for _, item in ipairs(open) do redis.call('HSET', KEYS[6], item[1], item[2]) end
  return open[1] and open[1][1]
end

-- The mark of a line that Spark has set aside covers its entries. They are open again, and what comes before them is done.
local function uncover(name, head)
  local mark = redis.call('HGET', KEYS[2], name)
  if not mark or less(mark, head) then return end
  local before = string.sub(name, 1, 1) == 'k' and redis.call('XREVRANGE', KEYS[7], '(' .. head, '-', 'COUNT', 1)[1]
  if before then redis.call('HSET', KEYS[2], name, before[1]) else redis.call('HDEL', KEYS[2], name) end
end

local function note_lines(keep_parked)
  local first
  for _, name in ipairs(all_lines()) do
    local kept = keep_parked and redis.call('HEXISTS', PARKED, name) == 1
    local ids = kept and {} or redis.call('LRANGE', line_of(name), 0, -1)
    for _, id in ipairs(ids) do redis.call('HSET', KEYS[6], id, WAITING) end
    if ids[1] then uncover(name, ids[1]) end
    if ids[1] and not (first and less(first, ids[1])) then first = ids[1] end
  end
  return first
end

-- Forget what was open, but for that beyond `last`; return the first of these.
local function drop_open(last)
  local first
  for _, id in ipairs(redis.call('HKEYS', KEYS[6])) do
    if not less(last, id) then
      redis.call('HDEL', KEYS[6], id)
    elseif not (first and less(first, id)) then
      first = id
    end
  end
  return first
end

-- Note what is open; return the first of it, and the floor.
local function note_open(name, engine, frontier, keep_parked)
  if engine ~= 'keyed' then
    local last = find_group(name)['last-delivered-id']
    -- An earlier run on Spark that was late may have set the group back.
    if frontier and less(last, frontier) then last = frontier end
    return note_pending(name, frontier), last
  end
  local floor = redis.call('HGET', KEYS[1], 'floor') or frontier -- one that is not passed yet
  local unrouted = drop_open(frontier)
  return note_lines(keep_parked) or unrouted, floor
end

-- `keep_parked`: whoever comes has lines, and waits with those that are parked.
local function take_over(name, engine, frontier, keep_parked)
  if not find_group(name) then remake_group(name, frontier, engine) end
  local first, floor = note_open(name, engine, frontier, keep_parked)
  if first then
    local before = redis.call('XREVRANGE', KEYS[7], '(' .. first, '-', 'COUNT', 1)[1]
    frontier = before and before[1] or '0-0'
    redis.call('HSET', KEYS[1], 'floor', floor)
  else
    frontier = floor
    redis.call('HDEL', KEYS[1], 'floor')
  end
  delete_consumers(name) -- their entries are beyond the frontier
  forget_lines(keep_parked)
  hold_lines(name)
  redis.call('HSET', KEYS[1], 'frontier', frontier)
  redis.call('HDEL', KEYS[1], 'engine')
  return frontier
end
