"""What is done about a stream that cannot be worked on, where it is one of many: it is left out, and the others go on."""

import contextlib
from collections.abc import Iterator

from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import AccessDenied, MillstreamError, WrongType


def concerns_one_stream(error: MillstreamError) -> bool:
    """True if there is nothing wrong but with the stream itself: its key holds something else, or is refused."""
    return isinstance(error, WrongType) or (isinstance(error, AccessDenied) and error.concerns_key)


@contextlib.contextmanager
def exclude_on_error(stream: ReliableStream) -> Iterator[None]:
    """Work on a stream no more, and tell its `leave_out`, if something is wrong with it only. Else it is raised."""
    try:
        yield
    except (WrongType, AccessDenied) as error:
        if stream.leave_out is None or not concerns_one_stream(error):
            raise
        if not stream.leaving:
            stream.leaving = True
            stream.leave_out(error)
