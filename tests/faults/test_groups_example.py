"""The example consumer, in processes of its own that are killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.groups import Consumer, Group
from millstream.redis_client.client import Client
from tests.support.waiting import eventually

pytestmark = [pytest.mark.groups, pytest.mark.faults]
EXAMPLE = Path(__file__).parents[2] / "examples" / "group_consumer.py"


@contextmanager
def running(url: str, name: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{len(list(folder.iterdir()))}.log").open("wb") as out:
        process = subprocess.Popen([sys.executable, str(EXAMPLE), url, name, "500"], stdout=out)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def processed(folder: Path) -> list[bytes]:
    """Ids of the messages that were processed, half-written last lines left out."""
    lines = [line for log in folder.iterdir() for line in log.read_bytes().splitlines(keepends=True)]
    return [line.split()[0] for line in lines if line.endswith(b"}\n")]


def test_the_specifications_example_consumer_has_fewer_than_thirty_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 30


def test_example_consumers_that_are_killed_and_restarted_lose_nothing(client: Client, tmp_path: Path) -> None:
    client.pipeline([("XADD", "mystream", f"{n}-0", "n", n) for n in range(1, 5001)])
    group = Group(client, "mystream", "mygroup")
    group.create()
    # A consumer that died for good, and what c1 itself held when it was last stopped.
    Consumer(client, group="mygroup", name="dead", streams=["mystream"]).read_new(count=10)
    Consumer(client, group="mygroup", name="c1", streams=["mystream"]).read_new(count=10)
    for goal in (300, 1500, 3000):
        with running(client.url, "c1", tmp_path) as first, running(client.url, "c2", tmp_path) as second:
            eventually(lambda goal=goal: len(processed(tmp_path)) >= goal, f"{goal} messages")  # type: ignore[misc]
            os.kill(first.pid, signal.SIGKILL)
            os.kill(second.pid, signal.SIGSTOP)
    with running(client.url, "c1", tmp_path):
        eventually(lambda: group.pending.summary().count == 0 and len(set(processed(tmp_path))) == 5000, "the drain")
    # What is idle for half a second is claimed by another: how much is processed twice, the machine decides.
    assert set(processed(tmp_path)) == {b"%d-0" % n for n in range(1, 5001)}
