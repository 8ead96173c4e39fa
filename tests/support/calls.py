"""Cost of code in function calls: independent of the machine and its load."""

import gc
import sys
from collections.abc import Callable
from types import FrameType


def calls_of(what: Callable[[], object]) -> list[str]:
    """The names of all functions, Python and C, that a call of `what` calls."""
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(getattr(argument, "__name__", "?"))

    collects = gc.isenabled()
    gc.disable()  # a collection calls what others have registered, as Hypothesis does
    sys.setprofile(note)
    try:
        what()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return names[1:-1]  # without `what` and `setprofile` themselves
