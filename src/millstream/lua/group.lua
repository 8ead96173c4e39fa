-- The consumer group of a handler that workers run. KEYS as of commit.lua.
local function pairs_of(items)
  local found = {}
  for i = 1, #items, 2 do found[items[i]] = items[i + 1] end
  return found
end

local function find_group(name)
  if redis.call('EXISTS', KEYS[7]) == 0 then return nil end
  for _, items in ipairs(redis.call('XINFO', 'GROUPS', KEYS[7])) do
    local group = pairs_of(items)
    if group['name'] == name then return group end
  end
end

-- Make the group again where it was lost: at the frontier, with the entries before it that are still open.
local function remake_group(name, frontier)
  redis.call('XGROUP', 'CREATE', KEYS[7], name, frontier or '0', 'MKSTREAM')
  for _, id in ipairs(redis.call('HKEYS', KEYS[6])) do
    redis.call('XCLAIM', KEYS[7], name, 'recovered', 0, id, 'IDLE', 86400000, 'FORCE', 'JUSTID')
  end
end
