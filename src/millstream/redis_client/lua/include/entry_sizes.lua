-- The size of an entry in bytes, as Redis sends it: that of its names and values.
local function size_of(entry)
  local parts, bytes = entry[2], 0
  for i = 1, #parts do bytes = bytes + #parts[i] end
  return bytes
end
