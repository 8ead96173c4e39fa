"""The handler contract on both engines: each runs all of its cases at once, then every case is judged by itself."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.contract import Case, ContractBroken, Engine, run_cases, verify
from tests.contract.worker_app import ALL
from tests.support.engines import SparkEngine, WorkerEngine
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.worker, pytest.mark.keys, pytest.mark.spark]

RETRIES = ("retries", "retries_async")  # their times are known within a process, which `time_limit` ends
APART = ("crashed", "restart", *RETRIES)
WAVE = 6


@dataclass
class Ran:
    """The Redis on which an engine has run each case; `broken` names those that it did not bring to an end."""

    clients: dict[str, Client]
    broken: dict[str, str]

    def judge(self, case: Case) -> None:
        if case.name in self.broken:
            raise ContractBroken(self.broken[case.name])
        verify(self.clients[case.name], case)


def ran(make_engine: Callable[[], Engine], parts: Sequence[Sequence[Case]]) -> Iterator[Ran]:
    """Run each part of the cases on a Redis of its own."""
    found = Ran({}, {})
    with ExitStack() as stack:

        def is_run(cases: Sequence[Case]) -> bool:
            server = stack.enter_context(EmbeddedServer(extra={"appendfsync": "no"}))
            try:
                run_cases(make_engine(), server.url, cases, within_s=FAIL_SAFE_S)
            except ContractBroken as error:
                if "stopped too late" in str(error):  # it was quicker than this process, which was to stop it
                    return False
                found.broken |= {case.name: str(error) for case in cases}
            found.clients |= dict.fromkeys((case.name for case in cases), stack.enter_context(Client(server.url)))
            return True

        for cases in parts:
            eventually(lambda: is_run(cases), "an engine that is stopped halfway")  # noqa: B023 - at once
        yield found


def named(*names: str) -> list[Case]:
    return [case for case in ALL if case.name in names]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return iter(lambda: tmp_path_factory.mktemp("engine"), None)


@pytest.fixture(scope="module")
def on_workers(millstream_server: EmbeddedServer, folders: Iterator[Path]) -> Iterator[Ran]:
    together = [case for case in ALL if case.name not in APART]
    yield from ran(lambda: WorkerEngine(next(folders)), (together, named(*RETRIES), named("crashed"), named("restart")))


@pytest.fixture(scope="module")
def on_spark(millstream_server: EmbeddedServer, spark: SparkSession, folders: Iterator[Path]) -> Iterator[Ran]:
    # Spark starts a process for each handler's query: two dozen at once have to wait too long for two cores.
    together = [case for case in ALL if case.name != "restart"]
    waves = [together[at : at + WAVE] for at in range(0, len(together), WAVE)]
    yield from ran(lambda: SparkEngine(spark, next(folders)), (*waves, named("restart")))


@pytest.mark.xdist_group("contract on workers")
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_workers_keep_the_contract(on_workers: Ran, case: Case) -> None:
    on_workers.judge(case)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_spark_keeps_the_contract(on_spark: Ran, case: Case) -> None:
    on_spark.judge(case)
