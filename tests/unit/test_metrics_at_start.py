"""Every counter exists, at 0, before its first event: `increase` sees no change in one that appears with it."""

from pathlib import Path
from typing import get_args

import pytest

from millstream import App, Message
from millstream.balancer import Balancer
from millstream.balancer.notifications import DisownCause, Notice
from millstream.errors import OutOfMemory, Unavailable
from millstream.handlers.dead_letter import Reason
from millstream.observability import metrics as m
from millstream.observability.metrics import CATALOGUE, Recorder
from millstream.producer.producer import Producer
from millstream.redis_client.client import Client
from millstream.router import ReadPolicy, Router
from millstream.router.stream_events import Reason as GapReason
from millstream.services.gateway.client_connection import FlowControl
from millstream.services.gateway.close_reasons import EndReason
from millstream.services.gateway.connection_manager import ConnectionLimits, ConnectionManager
from millstream.services.gateway.transports import Kind
from millstream.services.master.delegation import Delegator
from millstream.services.master.registry import Registry
from millstream.services.master.settings import MasterSettings
from millstream.services.web.connections import Connections, CutReason, Limits
from millstream.spark.run.query_metrics import init_run
from millstream.worker.process.process_reports import ProcessReports
from millstream.worker.process.worker_process import WorkerProcess, WorkerSettings

pytestmark = [pytest.mark.worker]

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"
NOWHERE = "redis://127.0.0.1:1/0"
MASTER = MasterSettings(ticket_stream="tickets", group="g")

KNOWN_VALUES: list[tuple[m.Metric, dict[str, str], str, set[str]]] = [
    *(
        (one, {}, "handler", {"shop.pay", "run.pay", MASTER.label})
        for one in (m.READ, m.COMMITTED, m.RETRIED, m.REFUSED)
    ),
    *((one, {}, "handler", {"shop.pay", MASTER.label}) for one in (m.CLAIMED, m.PARKED)),
    *((one, {}, "handler", {"shop.pay", "run.pay"}) for one in (m.HEAD_OF_LINE_AVOIDED, m.LIMITED)),
    (m.SPARK_ROWS, {}, "query", {"run.pay"}),
    (m.DEAD_LETTERED, {"handler": "run.pay"}, "reason", {""}),
    (m.DEAD_LETTERED, {"handler": "shop.pay"}, "reason", {*get_args(Reason)}),
    (m.DEAD_LETTERED, {"handler": MASTER.label}, "reason", {*get_args(Reason)}),
    (m.REDIS_ERRORS, {}, "error", {Unavailable.__name__, OutOfMemory.__name__}),
    (m.WORKER_RESTARTS, {}, "worker", {"w-0", "w-1"}),
    (m.LEASES_ENDED, {"service": "calls"}, "how", {*get_args(DisownCause), "released", "done", "refused", "closed"}),
    (m.LEASE_CLAIMS, {"service": "calls"}, "outcome", {"ok", "AlreadyOwned", "LeaseLost", "StreamNotFound"}),
    (m.LEASE_NOTIFICATIONS, {"service": "calls"}, "notice", {one.__name__ for one in get_args(Notice)}),
    (m.ROUTER_GAPS, {}, "reason", {*get_args(GapReason)}),
    (m.SERVE_SENT, {}, "kind", {*get_args(Kind)}),
    (m.SERVE_DROPPED, {}, "kind", {*get_args(Kind)}),
    (m.SERVE_ENDED, {}, "reason", {*get_args(EndReason)}),
    (m.SERVE_REFUSED, {}, "status", {"400", "401", "403", "405", "429", "503"}),
    (m.HTTP_DROPPED, {}, "reason", {*get_args(CutReason)}),
]
"""Counters with labels whose values are known at the start."""


def app(name: str = "shop") -> App:
    made = App(name)

    @made.handler("orders", key="customer")
    def pay(message: Message) -> None:
        """Do nothing."""

    return made


def start_everything(recorder: Recorder) -> None:
    """Make, but not run, every component that counts anything, as its command makes it."""
    WorkerProcess(app(), WorkerSettings(url=NOWHERE, consumer="w-0"), metrics=recorder)
    ProcessReports(recorder, {}).expect(["w-0", "w-1"])
    init_run(recorder, app("run").handlers.values())
    Balancer(NOWHERE, "calls", consumer="c-0", metrics=recorder)
    Producer(NOWHERE, metrics=recorder).close()
    router = Router(NOWHERE, read=ReadPolicy(), metrics=recorder)
    ConnectionManager(router, limits=ConnectionLimits(connections=1, per_token=1), pace=FlowControl(), metrics=recorder)
    Connections(Limits(connections=1), metrics=recorder)
    with Client(NOWHERE) as client:
        Delegator(client, Registry(client, MASTER.keys), MASTER, metrics=recorder)


def test_every_documented_counter_and_histogram_exists_before_its_first_event() -> None:
    recorder = Recorder()
    start_everything(recorder)
    shown = {sample.name: sample.value for family in recorder.collect() for sample in family.samples}
    rows = [line.split(" | ") for line in DOCUMENT.read_text().splitlines() if line.startswith("| `millstream_")]
    documented = {name.strip("| `"): kind for name, kind, *_ in rows}
    assert documented.keys() == {metric.name for metric in CATALOGUE}
    wanted = [name if kind == "counter" else f"{name}_count" for name, kind in documented.items() if kind != "gauge"]
    assert [name for name in wanted if name not in shown] == []
    assert [name for name in wanted if shown[name] != 0] == []


@pytest.mark.parametrize(("metric", "fixed", "label", "values"), KNOWN_VALUES)
def test_a_counter_exists_for_every_value_of_its_label_that_is_known_at_the_start(
    metric: m.Metric, fixed: dict[str, str], label: str, values: set[str]
) -> None:
    recorder = Recorder()
    start_everything(recorder)
    samples = [sample for family in recorder.collect() for sample in family.samples if sample.name == metric.name]
    shown = {one.labels[label]: one.value for one in samples if fixed.items() <= one.labels.items()}
    assert values <= shown.keys()
    assert {shown[value] for value in values} == {0}


def test_every_gauge_of_a_worker_exists_before_it_runs() -> None:
    recorder = Recorder()
    WorkerProcess(app(), WorkerSettings(url=NOWHERE, consumer="w-0"), metrics=recorder)
    shown = {sample.name: sample.value for family in recorder.collect() for sample in family.samples}
    zero = (m.IN_FLIGHT, m.IN_FLIGHT_BYTES, m.QUEUED, m.RUNNING, m.LONGEST_RUN, m.WAITING_FOR_RATE)
    assert [shown.get(gauge.name) for gauge in zero] == [0] * len(zero)
    assert shown[m.RUNNING_LIMIT.name] == 16


def test_a_producer_exports_the_count_of_its_errors_from_the_start() -> None:
    recorder = Recorder()
    with Producer(NOWHERE, metrics=recorder):
        errors = {
            sample.labels["error"]
            for family in recorder.collect()
            if family.name == "millstream_publish_errors"
            for sample in family.samples
        }
    assert Unavailable.__name__ in errors
