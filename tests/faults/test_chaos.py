"""Everything that may happen to workers and their Redis, at random and at once: no message is wrongly blamed, and all is exact."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.proxy import Proxy
from tests.support.keyed_workers import KeyedExpectations
from tests.support.worker_processes import (
    CLAIM_S,
    Expectations,
    PrintFigures,
    RunningWorkers,
    kill_random,
    random_process,
    resume_all,
    suspend,
    watched,
)

pytestmark = [pytest.mark.worker, pytest.mark.keys, pytest.mark.chaos, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
ROUNDS = 900 if SOAK else 9
"""Each kind of harm once; in a soak about an hour of them for each app."""
MESSAGES = 120
AWAY_S = 1.5 * CLAIM_S


class Nemesis:
    """Does harm to fleets, and to the Redis that they share. Each method is one kind of harm."""

    def __init__(self, server: EmbeddedServer, proxy: Proxy, client: Client, all_workers: list[RunningWorkers]) -> None:
        self._server = server
        self._proxy = proxy
        self._client = client
        self._workers = all_workers
        self._stopped: list[psutil.Process] = []

    @property
    def kinds(self) -> list[Callable[[random.Random], None]]:
        """All kinds of harm."""
        return [
            self.kill,
            self.kill_with_supervisor,
            self.kill_supervisor,
            self.stop_for_a_while,
            self.restart_in_order,
            self.kill_redis,
            self.stop_redis,
            self.cut,
            self.fill_memory,
        ]

    def kill(self, chance: random.Random) -> None:
        """kill -9 of a process."""
        kill_random(chance, self._workers)

    def kill_with_supervisor(self, chance: random.Random) -> None:
        """kill -9 of a supervisor and all its processes, as when a container ends."""
        workers = chance.choice(self._workers)
        workers.kill_all()
        workers.start()

    def kill_supervisor(self, chance: random.Random) -> None:
        """kill -9 of a supervisor alone; its processes end by themselves."""
        chance.choice(self._workers).replace_supervisor()

    def stop_for_a_while(self, chance: random.Random) -> None:
        """SIGSTOP of a process, for shorter or longer than its claim."""
        if victim := random_process(chance, self._workers):
            suspend(victim, self._stopped)

    def restart_in_order(self, chance: random.Random) -> None:
        """SIGTERM of a supervisor, and a new one."""
        workers = chance.choice(self._workers)
        workers.stop()
        workers.start()

    def kill_redis(self, chance: random.Random) -> None:
        """kill -9 of Redis, which is started again."""
        self._server.kill()
        time.sleep(chance.choice((0.0, AWAY_S)))
        self._server.start()
        self._client.retry_while_unavailable(lambda: self._client.execute("PING"), what="the test")

    def stop_redis(self, chance: random.Random) -> None:
        """Redis stands still for longer than a claim."""
        with standing_still(self._server):
            time.sleep(AWAY_S)

    def cut(self, chance: random.Random) -> None:
        """All connections are cut."""
        self._proxy.cut_all()

    def fill_memory(self, chance: random.Random) -> None:
        """Redis is at `maxmemory` for a while."""
        self._client.execute("CONFIG", "SET", "maxmemory", "1")
        time.sleep(chance.random())
        self._client.execute("CONFIG", "SET", "maxmemory", "0")

    def wake_up(self) -> None:
        """Let go on what was stopped."""
        resume_all(self._stopped)


@contextmanager
def standing_still(server: EmbeddedServer) -> Iterator[None]:
    process = psutil.Process(server.pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@pytest.mark.parametrize("app", ["brittle", "strict"])
def test_all_kinds_of_harm_at_once_lose_double_reorder_and_blame_no_message(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client, tmp_path: Path, print_figures: PrintFigures, app: str
) -> None:
    """Of a handler with three attempts, with a key or without: its messages do no harm, so none may be blamed."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    has_key = app == "brittle"
    expectations: Expectations = (
        KeyedExpectations(fresh_client, tmp_path, app=app) if has_key else Expectations(fresh_client, tmp_path, app=app)
    )
    harm: Counter[str] = Counter()
    with ExitStack() as stack, watched(expectations) as watch:
        proxy = stack.enter_context(Proxy(millstream_fresh_server.port))
        all_workers = [
            stack.enter_context(RunningWorkers(proxy.url, tmp_path, "--stop-timeout", "2", app=app, claim_s=CLAIM_S))
            for _ in range(2)
        ]
        nemesis = Nemesis(millstream_fresh_server, proxy, fresh_client, all_workers)
        for number in range(ROUNDS):
            publish(expectations, chance.choice((0, 1, 5)))
            time.sleep(chance.random())  # harm at any point
            kinds = nemesis.kinds
            kind = kinds[number] if number < len(kinds) else chance.choice(kinds)
            harm[kind.__name__] += 1
            kind(chance)
            if chance.random() < 0.5:
                nemesis.wake_up()
        nemesis.wake_up()
        report = (
            expectations.check_keys(overlap=False)
            if isinstance(expectations, KeyedExpectations)
            else expectations.check()
        )
    print_figures(report, watch, seed=seed, **harm)


def publish(expectations: Expectations, ms: int) -> None:
    """Some messages, of 30 keys where they have one."""
    if isinstance(expectations, KeyedExpectations):
        expectations.publish_keys(MESSAGES, 30, ms=ms)
    else:
        expectations.publish(MESSAGES, ms=ms)
