"""Workers that share whole streams are killed, stopped and cut off: each stream stays in order, and none is left alone."""

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from millstream.balancer.protocol import HEARTBEAT
from millstream.delivery.commit_store import JOIN_WORKERS
from millstream.delivery.keyed_stream import LEASE_KEYS, ROUTE
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.history import Event, Report, check, read_events
from millstream.testing.proxy import Proxy
from tests.support.waiting import eventually
from tests.support.worker_processes import (
    CLAIM_S,
    Expectations,
    PrintFigures,
    RunningWorkers,
    kill,
    random_process,
    resume_all,
    suspend,
)

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
pytestmark = [pytest.mark.balancer, pytest.mark.worker, pytest.mark.faults]

CUTS = 20 if SOAK else 3
STREAMS, MESSAGES, ROUNDS = (400, 100_000, 40) if SOAK else (24, 1_500, 5)


class StreamExpectations:
    """What was published to the streams, and what must have come of it: of each stream in order, with its state."""

    def __init__(self, client: Client, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self._outputs = Expectations(client, folder).outputs
        self.enqueued: dict[str, list[str]] = defaultdict(list)

    def publish(self, count: int, ms: int) -> None:
        """Add messages to all streams in rotation."""
        self.publish_to([f"call:{n % STREAMS}" for n in range(count)], ms)

    def publish_to(self, names: Sequence[str], ms: int = 0) -> None:
        """Add a message to each of these streams."""
        ids = self._client.retry_while_unavailable(
            lambda: self._client.pipeline([("XADD", name, "*", "ms", ms) for name in names]), what="test"
        )
        for name, entry_id in zip(names, ids, strict=True):
            self.enqueued[name].append(entry_id.decode())

    def _done(self) -> int:
        return int(self._client.retry_while_unavailable(lambda: self._client.execute("XLEN", "out"), what="test"))

    @property
    def total(self) -> int:
        """How many messages there were so far."""
        return sum(map(len, self.enqueued.values()))

    def is_done(self) -> bool:
        """Whether each has its effect."""
        return self._done() >= self.total

    def check(self, log: Callable[[], str]) -> Report:
        """Wait for the end, then judge the history."""
        eventually(self.is_done, "all effects", log=lambda: f"{self._done()} of {self.total}\n{log()}")
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
    millstream_fresh_server: EmbeddedServer, fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    """Three workers; kill -9 and SIGSTOP at random; connections cut; Redis restarted; workers come and go."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    expectations = StreamExpectations(fresh_client, tmp_path)
    deeds = ["kill", "stop", "cut", "restart", "leave"]
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(millstream_fresh_server.port))
        all_workers = [
            stack.enter_context(RunningWorkers(proxy.url, tmp_path, processes=1, app="streamed", claim_s=1))
            for _ in range(3)
        ]
        for workers in all_workers:
            workers.ready()
        stopped: list[psutil.Process] = []
        for number in range(ROUNDS):
            expectations.publish(MESSAGES // ROUNDS, chance.choice((0, 0, 1)))
            resume_all(stopped)
            deed = deeds[number % len(deeds)]
            if deed == "restart":
                millstream_fresh_server.kill()
                millstream_fresh_server.start()
                fresh_client.retry_while_unavailable(lambda: fresh_client.execute("PING"), what="test")
            elif deed == "cut":
                proxy.cut_all()
            elif deed == "leave":
                all_workers.pop(0).stop()
                all_workers.append(
                    stack.enter_context(RunningWorkers(proxy.url, tmp_path, processes=1, app="streamed", claim_s=1))
                )
            elif victim := random_process(chance, all_workers):
                if deed == "kill":
                    kill(victim)
                else:
                    suspend(victim, stopped)
            time.sleep(chance.uniform(0.3, 1.5))  # leases of a second end, or do not
        resume_all(stopped)
        report = expectations.check(all_workers[0].log)
    print_figures(report, seed=seed, streams=STREAMS, rounds=ROUNDS)


@pytest.mark.parametrize("side", ["before", "after"])
def test_connections_that_are_cut_while_workers_join_cost_no_message_and_no_order(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client, tmp_path: Path, side: str
) -> None:
    """Before a step is executed, or its reply is lost: the first of the service, of the streams, of their key queues."""
    expectations = StreamExpectations(fresh_client, tmp_path)
    expectations.publish(STREAMS * 3, 0)
    with Proxy(millstream_fresh_server.port) as proxy:
        for script in (HEARTBEAT, JOIN_WORKERS, ROUTE, LEASE_KEYS):
            fresh_client.execute("SCRIPT", "LOAD", script.text)  # so that it is called by its hash
            cut = proxy.cut_before if side == "before" else proxy.cut_after
            cut("EVALSHA", containing=script.sha, times=3)
        with (
            RunningWorkers(proxy.url, tmp_path, "--name", "one", processes=1, app="streamed", claim_s=CLAIM_S) as one,
            RunningWorkers(proxy.url, tmp_path, "--name", "two", processes=1, app="streamed", claim_s=CLAIM_S) as two,
        ):
            one.ready()
            two.ready()
            expectations.publish(STREAMS * 3, 0)
            expectations.check(lambda: one.log() + two.log())
            eventually(lambda: sum(proxy.cuts.values()) == 12, "all cuts", log=lambda: str(proxy.cuts))
            expectations.publish(STREAMS, 0)
            expectations.check(lambda: one.log() + two.log())


def test_connections_that_are_cut_beside_an_excluded_stream_cost_the_others_nothing(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client, tmp_path: Path
) -> None:
    expectations = StreamExpectations(fresh_client, tmp_path)
    fresh_client.execute("XADD", "call:a}b", "*", "ms", 0)  # nothing can be kept beside a stream of this name
    with (
        Proxy(millstream_fresh_server.port) as proxy,
        RunningWorkers(proxy.url, tmp_path, "--name", "one", processes=1, app="streamed", claim_s=CLAIM_S) as one,
        RunningWorkers(proxy.url, tmp_path, "--name", "two", processes=1, app="streamed", claim_s=CLAIM_S) as two,
    ):
        expectations.publish(STREAMS, 0)
        expectations.publish_to(["call:odd"])
        expectations.check(one.log)
        fresh_client.pipeline([("DEL", "call:odd"), ("SET", "call:odd", "no stream any more")])
        for _ in range(CUTS):
            expectations.publish(STREAMS, 0)
            proxy.cut_all()
            time.sleep(0.2)  # a cut at any point
        eventually(lambda: "cannot process stream 'call:odd'" in one.log() + two.log(), "it to be left out")
        for _ in range(CUTS):
            expectations.publish(STREAMS, 0)
            proxy.cut_all()
            time.sleep(0.2)  # a cut at any point
        expectations.check(lambda: one.log() + two.log())
        assert [workers.supervisor.poll() for workers in (one, two)] == [None, None]


def test_streams_of_a_killed_worker_go_on_elsewhere(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    """How soon: `benchmarks recovery`."""
    expectations = StreamExpectations(fresh_client, tmp_path)
    with RunningWorkers(
        fresh_client.url, tmp_path, "--name", "heir", processes=1, app="streamed", claim_s=CLAIM_S
    ) as heir:
        heir.ready()
        with RunningWorkers(
            fresh_client.url, tmp_path, "--name", "dying", processes=1, app="streamed", claim_s=CLAIM_S
        ) as dying:
            dying.ready()

            def both_work() -> bool:
                if expectations.is_done():
                    expectations.publish(STREAMS, 1)
                return dying.figures()["committed"] > 0 and heir.figures()["committed"] > 0

            eventually(both_work, "work on both", log=dying.log)
            (child,) = dying.children()
            runs = tmp_path / f"events.{child.pid}"
            before = runs.stat().st_size
            expectations.publish(STREAMS * 2, 20)

            def works() -> bool:
                if expectations.is_done():  # the other may have had all streams for a while
                    expectations.publish(STREAMS * 2, 20)
                return runs.stat().st_size > before

            eventually(works, "the one to die at work", log=dying.log)
            dying.kill_all()
            expectations.publish(STREAMS, 0)
            report = expectations.check(heir.log)
    print_figures(report, lease_s=CLAIM_S)
