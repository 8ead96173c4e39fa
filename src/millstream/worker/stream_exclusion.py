"""Stream exclusion: a worker leaves out a stream that it cannot work on, and keeps the others."""

import contextlib
from collections.abc import Iterator

from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import AccessDenied, MillstreamError, WrongType


def concerns_one_stream(error: MillstreamError) -> bool:
    """Return True if the error concerns the stream alone: its key is of another type, or access to it is denied."""
    return isinstance(error, WrongType) or (isinstance(error, AccessDenied) and error.concerns_key)


@contextlib.contextmanager
def exclude_on_error(stream: ReliableStream) -> Iterator[None]:
    """Stop work on a stream and call its `on_stream_error`, if an error concerns that stream alone. Raises other errors."""
    try:
        yield
    except (WrongType, AccessDenied) as error:
        if stream.on_stream_error is None or not concerns_one_stream(error):
            raise
        if not stream.leaving:
            stream.leaving = True
            stream.on_stream_error(error)
