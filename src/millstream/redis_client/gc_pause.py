"""Keeps Python's garbage collector from scanning large replies of Redis again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_CONTAINERS_PER_COLLECTION = 200_000


@contextmanager
def gc_paused() -> Iterator[None]:
    """Make garbage collections rare in the block: replies are a million small lists without cycles, and with the usual
    threshold planning and reading take twice as long.
    """
    before = gc.get_threshold()
    gc.set_threshold(_CONTAINERS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
