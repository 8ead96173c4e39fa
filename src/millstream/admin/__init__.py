"""What operators see and may do: figures of streams, groups and handlers, and the rights of each role in Redis."""
