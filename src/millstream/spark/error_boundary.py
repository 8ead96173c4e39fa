"""Strips our frames from errors raised into Spark, so that users see the message, not our traceback."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

from millstream.errors import MillstreamError

P = ParamSpec("P")
T = TypeVar("T")


def clean_tracebacks(call: Callable[P, T]) -> Callable[P, T]:
    """Make `call` raise MillstreamErrors without our frames and without their cause.

    Their text is written for users; twenty frames before it hide it.
    """

    @wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except MillstreamError as error:
            raise error.with_traceback(None) from None

    return guarded


def clean_traceback(items: Iterator[T]) -> Iterator[T]:
    """Yield `items`, and do the same for errors that their iteration raises."""
    try:
        yield from items
    except MillstreamError as error:
        raise error.with_traceback(None) from None
