"""Running handlers: in threads, in an event loop, in batches, in isolation."""
