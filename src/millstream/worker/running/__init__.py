"""How handlers are run: in threads, in an event loop, in lists, in isolation."""
