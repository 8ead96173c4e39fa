"""Workers that share whole streams are killed, stopped and cut off: each stream stays in order, and none is left alone."""

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from millstream.client import Client
from millstream.server import EmbeddedServer
from millstream.testing.history import Event, Report, check, read_events
from millstream.testing.proxy import Proxy
from tests.faults.fleet import Books, Fleet, Tell, eventually, wake_up

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600 if SOAK else 120)]

STREAMS, MESSAGES, ROUNDS = (400, 100_000, 40) if SOAK else (40, 6_000, 8)
APP = {"app": "streamed"}


@pytest.fixture
def client(millstream_fresh_server: EmbeddedServer) -> Iterator[Client]:
    with Client(millstream_fresh_server.url) as opened:
        yield opened


class StreamBooks:
    """What was published to the streams, and what must have come of it: of each stream in order, with its state."""

    def __init__(self, client: Client, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self._outputs = Books(client, folder).outputs
        self.enqueued: dict[str, list[str]] = defaultdict(list)

    def publish(self, count: int, ms: int) -> None:
        """Add messages to all streams in turns."""
        names = [f"call:{n % STREAMS}" for n in range(count)]
        ids = self._client.patiently(
            lambda: self._client.pipeline([("XADD", name, "*", "ms", ms) for name in names]), what="test"
        )
        for name, entry_id in zip(names, ids, strict=True):
            self.enqueued[name].append(entry_id.decode())

    def _done(self) -> int:
        return int(self._client.patiently(lambda: self._client.execute("XLEN", "out"), what="test"))

    def check(self, log: Callable[[], str], *, within_s: float) -> Report:
        """Wait for the end, then judge the history."""
        total = sum(map(len, self.enqueued.values()))
        eventually(
            lambda: self._done() >= total, "all effects", within_s=within_s,
            log=lambda: f"{self._done()} of {total}\n{log()}",
        )  # fmt: skip
        rows = self._outputs()
        enqueued = [
            Event(kind="enqueued", stream=name, id=one, key=name.encode())
            for name, ids in self.enqueued.items()
            for one in ids
        ]
        effects = [
            Event(
                kind="committed",
                stream=row["stream"],
                id=row["id"],
                key=row["key"].encode(),
                handler="work",
                position=at,
            )
            for at, row in enumerate(rows)
        ]
        runs = list(read_events(*self._folder.glob("events.*")))
        report = check([*enqueued, *runs, *effects], handlers={name: ["work"] for name in self.enqueued}, overlap=False)
        report.raise_if_bad()
        counts: dict[str, int] = defaultdict(int)
        fences: dict[str, int] = defaultdict(int)
        for row in rows:
            name = row["stream"]
            counts[name] += 1
            assert int(row["count"]) == counts[name], f"the state of {name} skipped or repeated: {row}"
            assert int(row["fence"]) >= fences[name], f"a stale worker has written to {name}: {row}"
            fences[name] = int(row["fence"])
        return report


def test_chaos_keeps_every_stream_in_order_and_loses_and_doubles_nothing(
    millstream_fresh_server: EmbeddedServer, client: Client, tmp_path: Path, tell: Tell
) -> None:
    """Three workers; kill -9 and SIGSTOP at random; connections cut; Redis restarted; workers come and go."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    books = StreamBooks(client, tmp_path)
    deeds = ["kill", "stop", "cut", "restart", "leave"]
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(millstream_fresh_server.port))
        fleets = [stack.enter_context(Fleet(proxy.url, tmp_path, processes=1, **APP)) for _ in range(3)]
        for fleet in fleets:
            fleet.ready()
        stopped: list[psutil.Process] = []
        for number in range(ROUNDS):
            books.publish(MESSAGES // ROUNDS, chance.choice((0, 0, 1)))
            wake_up(stopped)
            deed = deeds[number % len(deeds)]
            children = [child for fleet in fleets for child in fleet.children()]
            if deed == "restart":
                millstream_fresh_server.kill()
                millstream_fresh_server.start()
                client.patiently(lambda: client.execute("PING"), what="test")
            elif deed == "cut":
                proxy.cut_all()
            elif deed == "leave":
                fleets.pop(0).stop()
                fleets.append(stack.enter_context(Fleet(proxy.url, tmp_path, processes=1, **APP)))
            elif children:
                victim = chance.choice(children)
                if deed == "kill":
                    victim.kill()
                else:
                    victim.suspend()
                    stopped.append(victim)
            time.sleep(chance.uniform(0.5, 2.0))
        wake_up(stopped)
        report = books.check(fleets[0].log, within_s=600 if SOAK else 60)
    tell(report, seed=seed, streams=STREAMS, rounds=ROUNDS)


@pytest.mark.alone
def test_streams_of_a_worker_that_is_killed_go_on_elsewhere(client: Client, tmp_path: Path, tell: Tell) -> None:
    books = StreamBooks(client, tmp_path)
    with Fleet(client.url, tmp_path, "--name", "heir", processes=1, **APP) as heir:
        heir.ready()
        with Fleet(client.url, tmp_path, "--name", "dying", processes=1, **APP) as dying:
            dying.ready()
            books.publish(STREAMS * 10, 1)
            eventually(lambda: dying.figures()["committed"] > 0, "work on both", log=dying.log)
            (child,) = dying.children()
            dying.supervisor.kill()
            child.kill()
            books.publish(STREAMS * 10, 0)
            began = time.monotonic()
            report = books.check(heir.log, within_s=30)
            took_s = time.monotonic() - began
    tell(report, all_done_within_s=round(took_s, 2), lease_s=1.0)
    assert took_s < 5.0
