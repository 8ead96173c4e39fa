"""The protocol of reliable delivery: commits, pending entries, keyed queues, deferral, dead letters and delays."""
