"""Server-side steps: one Lua script a file, each beginning with its keys, arguments, reply and invariants."""
