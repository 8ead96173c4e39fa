"""How a worker gets its messages: entries of a group, or leases on keyed queues."""
