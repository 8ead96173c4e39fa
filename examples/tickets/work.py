"""The work of the Python consumers: `millstream consumer examples/tickets/work.py:work`.

It notes what it does in a file, so that the order can be judged afterwards.
"""

import os
import time

from millstream import Message
from millstream.testing.history import Event, Recorder

recorder = Recorder(os.environ["TICKETS_LOG"])


def work(message: Message) -> None:
    """Work on one message of a ticket."""

    def note(kind: str) -> None:
        recorder.record(
            Event(
                kind=kind,  # type: ignore[arg-type] # one of three below
                stream=message.stream,
                id=message.id,
                key=message.key,
                worker=str(os.getpid()),
            )
        )

    note("started")
    time.sleep(float(os.environ.get("WORK_MS", "5")) / 1000)
    note("ended")
    note("committed")
