#!lua
-- Acknowledge a page of a batch: the entries that are still pending with its consumers.
--
-- KEYS  1 stream   2 record (hash: epoch, token, batch, step, gone)   3 ids of the batch (list)
-- ARGV  1 epoch of the run   2 group   3 consumer; the batch's portions are held by <consumer>:<number>
-- REPLY how many ids are left; how many entries other consumers had claimed; how many were not pending any more
-- ERROR STALE when a newer run owns the batches; NOGROUP when the group does not exist
--
-- INVARIANT  XACK does not check the consumer, so this script does: a claimed entry is for its new consumer to
--   acknowledge.

-- include ids
-- include run_fence

local PAGE = 500

local refusal = refuse_older(ARGV[1])
if refusal then return refusal end

local function is_ours(holder)
  local prefix = ARGV[3] .. ':'
  return holder == ARGV[3] or (string.sub(holder, 1, #prefix) == prefix and string.find(holder, '^%d+$', #prefix + 1))
end

local ids = redis.call('LRANGE', KEYS[3], 0, PAGE - 1)
local ours, others, not_pending = {}, 0, 0
for _, id in ipairs(ids) do
  local found = redis.call('XPENDING', KEYS[1], ARGV[2], id, id, 1)
  if #found == 0 then
    not_pending = not_pending + 1
  elseif is_ours(found[1][2]) then
    ours[#ours + 1] = id
  else
    others = others + 1
  end
end
if #ours > 0 then redis.call('XACK', KEYS[1], ARGV[2], unpack(ours)) end
redis.call('LTRIM', KEYS[3], #ids, -1)
return {redis.call('LLEN', KEYS[3]), others, not_pending}
