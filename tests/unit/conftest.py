"""Fixtures of several unit tests: runners without a reading loop, see `tests/support/runners.py`."""

from collections.abc import Iterator

import pytest

from millstream.delivery.reliable_stream import ReliableStream
from millstream.worker import WorkerPolicy
from millstream.worker.in_flight import InFlight
from tests.support.runners import unreachable_stream


@pytest.fixture
def stream() -> Iterator[ReliableStream]:
    """A stream of a server that is not there."""
    with unreachable_stream() as found:
        yield found


@pytest.fixture
def in_flight() -> InFlight:
    """The entries in flight of a worker that runs one at a time."""
    return InFlight(WorkerPolicy(), 1)
