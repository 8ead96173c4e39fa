"""The chunks in which dead letters are redriven or purged, at a rate or as fast as Redis takes them."""

import math
import time
from collections.abc import Callable, Iterator, Sequence

from millstream.delivery.dead_letter_queue import DeadLetterRef

_MOST_AT_ONCE = 50  # a stop waits for so many letters at most


def chunks_at(
    refs: Sequence[DeadLetterRef], rate: float | None, wait: Callable[[float], bool]
) -> Iterator[Sequence[DeadLetterRef]]:
    """Yield some letters at a time, in order, as `rate` allows: letters a second; None: no limit.

    At a low rate they are spread evenly. `wait` is called before each chunk, also if it is due: it waits for so many
    seconds, or returns True to end this.
    """
    per_s = math.inf if rate is None else rate
    size = max(1, int(min(_MOST_AT_ONCE, per_s / 10)))
    due_s = 0.0
    for at in range(0, len(refs), size):
        if wait(max(0.0, due_s - time.monotonic())):
            return
        due_s = max(due_s, time.monotonic()) + size / per_s
        yield refs[at : at + size]
