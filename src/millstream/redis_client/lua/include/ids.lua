-- Entry ids are compared as digit strings: both halves go up to 2^64, more than a Lua number holds exactly.
local function less_number(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

local function less(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)-(%d+)$')
  if a_ms ~= b_ms then return less_number(a_ms, b_ms) end
  return less_number(a_seq, b_seq)
end

local function stale(token, epoch)
  if epoch and less_number(token, epoch) then
    return redis.error_reply('STALE token ' .. token .. ' is older than epoch ' .. epoch)
  end
end
