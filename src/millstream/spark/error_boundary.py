"""Error boundary to Spark: users see the message of an error, not our traceback, and no error of an orderly end."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from millstream.errors import MillstreamError

P = ParamSpec("P")
T = TypeVar("T")

_SOURCE_RUNNER = "python_streaming_source_runner.py"
"""PySpark's program for the driver's side of a streaming source; it calls the reader's `stop` at its end."""


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


def end_process_if_disconnected() -> None:
    """End this process if it runs a streaming source, and an error of its connection to Java is being handled.

    A query that is stopped closes the connection while the source may plan a batch, and only then ends the process. On a
    busy machine the process would come to print the error as a traceback before that. Call it last.
    """
    program = getattr(sys.modules["__main__"], "__file__", None) or ""
    if Path(program).name == _SOURCE_RUNNER and isinstance(sys.exc_info()[1], (EOFError, ConnectionError)):
        os._exit(0)


def clean_traceback(items: Iterator[T]) -> Iterator[T]:
    """Yield `items`, and do the same for errors that their iteration raises."""
    try:
        yield from items
    except MillstreamError as error:
        raise error.with_traceback(None) from None
