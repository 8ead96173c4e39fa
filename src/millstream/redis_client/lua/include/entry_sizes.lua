-- How many bytes an entry has, as Redis sends it: those of its names and values.
local function size_of(entry)
  local parts, bytes = entry[2], 0
  for i = 1, #parts do bytes = bytes + #parts[i] end
  return bytes
end
