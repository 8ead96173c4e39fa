"""The work of the Python consumers: `millstream consumer examples/tickets/work.py:work`.

It records its steps in a file, so that the order can be checked afterwards.
"""

import os
import time

from millstream import Message
from millstream.testing.history import Event, Recorder

recorder = Recorder(os.environ["TICKETS_LOG"])


def work(message: Message) -> None:
    """Process one message of a ticket."""

    def record(kind: str) -> None:
        recorder.record(
            Event(
                kind=kind,  # type: ignore[arg-type] # one of three below
                stream=message.stream,
                id=message.id,
                key=message.key,
                worker=str(os.getpid()),
            )
        )

    record("started")
    time.sleep(float(os.environ.get("WORK_MS", "5")) / 1000)
    record("ended")
    record("committed")
