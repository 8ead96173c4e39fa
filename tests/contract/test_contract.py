"""The handler contract on both engines: each runs all of its cases at once, then every case is judged by itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
from pyspark.sql import SparkSession

from millstream.client import Client
from millstream.errors import ConfigError
from millstream.server import EmbeddedServer
from millstream.testing.contract import Case, ContractBroken, Engine, app_of, judge, put_through
from millstream.testing.contract_cases import CASES
from tests.contract.engines import Loops, Pipelines, Processes
from tests.contract.pydantic_case import PYDANTIC

ALL = (*CASES, PYDANTIC)
UNKEYED = [case for case in ALL if not case.keyed]
KEYED = [case for case in ALL if case.keyed]


@dataclass
class Ran:
    """A Redis on which an engine has run its cases; `broken` tells of those that it could not bring to an end."""

    client: Client
    broken: dict[str, str]

    def judge(self, case: Case) -> None:
        if case.name in self.broken:
            raise ContractBroken(self.broken[case.name])
        judge(self.client, case)


def ran(engines: Mapping[Engine, Sequence[Case]]) -> Iterator[Ran]:
    with EmbeddedServer(extra={"appendfsync": "no"}) as server, Client(server.url) as client:
        broken: dict[str, str] = {}
        for engine, cases in engines.items():
            try:
                put_through(engine, server.url, cases)
            except ContractBroken as error:
                broken |= {case.name: str(error) for case in cases}
        yield Ran(client, broken)


def named(*names: str) -> list[Case]:
    return [case for case in ALL if case.name in names]


@pytest.fixture(scope="module")
def on_workers(millstream_server: EmbeddedServer) -> Iterator[Ran]:
    apart = named("crashed", "restart")
    rest = [case for case in UNKEYED if case not in apart]
    yield from ran({Loops(): rest, Processes(): named("crashed"), Loops(): named("restart")})


@pytest.fixture(scope="module")
def on_spark(
    millstream_server: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ran]:
    folders = [tmp_path_factory.mktemp("checkpoints") for _ in range(2)]
    rest = [case for case in ALL if case.name != "restart"]
    yield from ran({Pipelines(spark, folders[0]): rest, Pipelines(spark, folders[1]): named("restart")})


@pytest.mark.parametrize("case", UNKEYED, ids=lambda case: case.name)
def test_workers_keep_the_contract(on_workers: Ran, case: Case) -> None:
    on_workers.judge(case)


@pytest.mark.parametrize("case", KEYED, ids=lambda case: case.name)
def test_workers_refuse_what_they_cannot_keep_yet(case: Case, millstream_url: str) -> None:
    """When workers keep keys, this test goes, and the one above gets all cases."""
    with pytest.raises(ConfigError, match="order per key is not kept by workers yet"):
        Loops()(app_of([case]), millstream_url, lambda: False)


@pytest.mark.spark
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_spark_keeps_the_contract(on_spark: Ran, case: Case) -> None:
    on_spark.judge(case)
