"""The whole pipeline, source, engine and dead letters, on every kind of Redis deployment."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millstream import App, Reject, State
from millstream.admin.acl import RoleName, acl_rule
from millstream.errors import AccessDenied, ConfigError
from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from millstream.testing import topologies
from tests.support.pipelines import Pipelines
from tests.support.replicas import kill_primary, steady_trio
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]
STREAMS = ("orders:{1}", "orders:{2}", "orders:{3}")


@dataclass
class Order:
    """An order of one customer."""

    customer: str
    amount: int


def sums_app(*streams: str) -> App:
    app = App("app")

    @app.handler(*streams, key="customer")
    def sums(order: Order, state: State) -> None:
        if order.amount < 0:
            raise Reject("negative")
        state["sum"] = state.get("sum", 0) + order.amount

    return app


def check(spark: SparkSession, url: str, folder: Path, *, admin: str = "") -> None:
    """Fill three streams, process them in two runs, and check state, dead letters and lag, as `admin` if given."""
    with Client(admin or url) as client:
        pipelines = Pipelines(spark, url, folder, client)
        app = sums_app(*STREAMS)
        for part in range(2):
            for stream in STREAMS:
                pipelines.add(
                    stream, *({"customer": f"c{n % 7}", "amount": n - 1} for n in range(part * 50, part * 50 + 50))
                )
            pipelines.once(app, max_per_batch=80)
        for stream in STREAMS:
            for customer in range(7):
                total = sum(n - 1 for n in range(100) if n % 7 == customer and n)
                assert pipelines.state("app", "sums", stream, f"c{customer}") == {"sum": total}
            (letter,) = pipelines.dead("app", "sums", stream)
            assert (letter.reason, letter.key) == ("rejected", b"c0")
            (group,) = client.execute("XINFO", "GROUPS", stream)
            assert mapping_of(group)[b"lag"] == 0


def test_a_run_works_on_a_cluster_of_three_nodes(spark: SparkSession, tmp_path: Path) -> None:
    with topologies.cluster() as deployed:
        check(spark, deployed.url, tmp_path)
        app = App("other")
        app.handler(STREAMS[0], into="elsewhere", key="customer")(amounts)
        with (
            Client(deployed.url) as client,
            pytest.raises(ConfigError, match=r"must share the hash slot .*\{1\}elsewhere"),
        ):
            Pipelines(spark, deployed.url, tmp_path / "into", client).once(app)


def amounts(order: Order) -> dict[str, object]:
    """A handler with an output."""
    return {"amount": order.amount}


@pytest.mark.usefixtures("tls")
def test_a_run_works_on_a_server_that_speaks_tls_only(spark: SparkSession, tmp_path: Path) -> None:
    with topologies.tls_server() as deployed:
        check(spark, deployed.url, tmp_path)


def test_a_run_works_with_only_the_required_rights(spark: SparkSession, tmp_path: Path) -> None:
    printed = acl_rule("spark", [RoleName.SPARK], streams=STREAMS, app="app").line.removeprefix("ACL SETUSER spark on")
    rules = [f"spark >secret{printed}", "guest >secret ~nothing:* +ping", "admin >secret ~* +@all"]
    with topologies.acl_server(rules) as deployed:
        check(spark, deployed.urls["spark"], tmp_path, admin=deployed.urls["admin"])
        with Client(deployed.urls["guest"]) as unprivileged, pytest.raises(AccessDenied, match="may not do"):
            unprivileged.execute("XLEN", "orders:{1}")
        wrong = deployed.urls["spark"].replace("secret", "guess")
        with Client(wrong) as unauthenticated, pytest.raises(AccessDenied, match="check user and password") as caught:
            unauthenticated.execute("PING")
        assert "guess" not in str(caught.value)


def test_a_run_works_on_a_sentinel_trio_through_a_failover(spark: SparkSession, tmp_path: Path) -> None:
    with steady_trio() as deployed, Client(deployed.url) as client:
        pipelines = Pipelines(spark, deployed.url, tmp_path, client)
        pipelines.add("orders", *({"customer": "c", "amount": 1} for _ in range(100)))
        with pipelines.running(sums_app("orders")):
            eventually(lambda: pipelines.state("app", "sums", "orders", "c") == {"sum": 100}, "the first hundred")
            eventually(lambda: client.execute("WAIT", 1, 1_000) == 1, "a replica that has them, too")
            kill_primary(deployed)
            client.retry_while_unavailable(
                lambda: pipelines.add("orders", {"customer": "c", "amount": 1000}), what="the test"
            )
            eventually(
                lambda: (
                    client.retry_while_unavailable(
                        lambda: pipelines.state("app", "sums", "orders", "c"), what="the test"
                    )["sum"]
                    >= 1100
                ),
                "the work after the failover",
            )
        assert pipelines.meta("app", "sums", "orders")["committed"] == "101"
