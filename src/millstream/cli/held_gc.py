"""Keeps Python's garbage collector off while a process starts.

Imports leave hardly any garbage, and collections take a sixth of their time. After the start, what is loaded is frozen:
no later collection traverses it, nor the last ones at the end of the process (Python docs, "gc.freeze").
"""

import gc


def hold_gc() -> None:
    """Let this process collect no garbage until `release_gc`."""
    gc.disable()


def release_gc() -> None:
    """End the start of a process that `hold_gc` began. Any other process, as one that runs tests, is left as it is."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
