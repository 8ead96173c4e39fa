"""Where our errors leave for Spark, which shows each with its traceback: only what is wrong is to stand there."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

from millstream.errors import MillstreamError

P = ParamSpec("P")
T = TypeVar("T")


def clean_tracebacks(call: Callable[P, T]) -> Callable[P, T]:
    """Make `call` raise our errors without the way through our code, and without what they come from.

    Their text is made for users; twenty frames before it hide it.
    """

    @wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except MillstreamError as error:
            raise error.with_traceback(None) from None

    return guarded


def clean_traceback(items: Iterator[T]) -> Iterator[T]:
    """The same for what raises while it is gone through."""
    try:
        yield from items
    except MillstreamError as error:
        raise error.with_traceback(None) from None
