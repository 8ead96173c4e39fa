"""Threads by their name. Another test of the process may have left some: a test compares with those before it."""

import threading


def threads_named(name: str) -> set[threading.Thread]:
    """Return the threads of this process that have this name."""
    return {thread for thread in threading.enumerate() if thread.name == name}
