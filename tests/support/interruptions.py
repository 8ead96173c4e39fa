"""Exceptions that come from outside, as those of Ctrl-C do: at each step of a piece of code, one after another."""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

IsStep = Callable[[FrameType, str], bool]
"""Whether an event of a frame (`sys.settrace`) is a step at which the exception may come."""


class Interruption(BaseException):
    """As KeyboardInterrupt, which would end the tests if it were raised in another place."""


def interrupt(action: Callable[[], object], at: int, is_step: IsStep) -> bool:
    """Do `action`, and raise Interruption in it before its step number `at`, from 0. False if it has fewer steps.

    It may raise another one by itself before.
    """
    left = at

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if is_step(frame, event):
            left -= 1
            if left < 0:
                raise Interruption
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces instructions only if a frame asked for that before
    sys.settrace(trace)
    try:
        raise Interruption
    except Interruption:
        # The end of this block restores what Python handles as an exception. An interruption between the last instructions
        # of an `except` block within the action leaves its exception there, as the context of all later ones.
        try:
            with suppress(Interruption):
                action()
        finally:
            sys.settrace(before)
    return left < 0


def opcodes_of(*files: str) -> IsStep:
    """Each instruction of code in `files`, which the ends of paths name."""
    return lambda frame, event: event == "opcode" and frame.f_code.co_filename.endswith(files)


def opcodes_of_functions(*names: str) -> IsStep:
    """Each instruction of the functions with these names."""
    return lambda frame, event: event == "opcode" and frame.f_code.co_name in names


def call_of(name: str) -> IsStep:
    """The begin of each call of a function with this name."""
    return lambda frame, event: event == "call" and frame.f_code.co_name == name
