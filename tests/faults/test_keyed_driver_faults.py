"""Drivers and Spark's Python workers are killed: each message of a key takes effect once, in order, on the right state."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from millstream.redis_client.client import Client
from tests.support.apps.worker_app import BATCH_STATE_TTL_MS
from tests.support.expiring_keys import KEYS, ExpiringExpectations
from tests.support.keyed_workers import KeyedExpectations
from tests.support.killed_drivers import killed_driver
from tests.support.waiting import eventually
from tests.support.worker_processes import PrintFigures

pytestmark = [
    *(pytest.mark.spark, pytest.mark.keys, pytest.mark.drivers, pytest.mark.faults),
    pytest.mark.skipif(not os.environ.get("MILLSTREAM_SOAK"), reason="a Spark of its own, started often: make soak"),
]

KILLS = 50


class OnSpark(KeyedExpectations):
    """Expectations on Spark, where messages of a batch are not pending."""

    def publish_more(self) -> None:
        """See Expectations."""
        self.publish_keys(12 * KEYS, KEYS, ms=5)

    def drained(self) -> bool:
        """See Expectations."""
        return self.is_done_on_spark()


class ExpiringOnSpark(OnSpark, ExpiringExpectations):
    """Expectations of the app `lasting` on Spark."""

    ttl_ms = BATCH_STATE_TTL_MS

    def publish_more(self) -> None:
        """See Expectations. Every second time, once all states have expired. Most kills hit a batch that runs."""
        if len(self.enqueued) % (24 * KEYS):
            eventually(self.drained, "the last message")
            eventually(self.states_have_expired, "the end of all states")
        super().publish_more()

    def await_continued(self) -> None:
        """Publish until messages have run on the states of an earlier batch."""

        def have_continued() -> bool:
            self.publish_keys(KEYS, KEYS)
            eventually(self.drained, "the last message")
            self.check_states(self.outputs())
            return self.continued >= KEYS

        eventually(have_continued, "states that last over batches")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the apps write what they have run."""
    monkeypatch.setenv("MILLSTREAM_TEST_FOLDER", str(tmp_path))
    return tmp_path


def kill_often(
    expectations: KeyedExpectations, app: str, print_figures: PrintFigures, at_last: Callable[[], None] = lambda: None
) -> None:
    """Kill drivers and Python workers of the app, then let it end, and check what it has done."""
    with killed_driver(expectations, app, KILLS) as nemesis:
        at_last()
        eventually(expectations.drained, f"the last message; seed {nemesis.seed}", log=nemesis.driver.errors)
        report = expectations.check_keys(overlap=False, log=nemesis.driver.errors)
    print_figures(report, kills=nemesis.killed, driver_starts=nemesis.driver.starts, seed=nemesis.seed)


def test_lists_of_a_key_keep_its_order_while_drivers_and_tasks_are_killed(
    fresh_client: Client, folder: Path, print_figures: PrintFigures
) -> None:
    kill_often(OnSpark(fresh_client, folder, app="listed"), "listed", print_figures)


def test_each_state_is_upcast_once_while_drivers_and_tasks_are_killed(
    fresh_client: Client, folder: Path, print_figures: PrintFigures
) -> None:
    expectations = OnSpark(fresh_client, folder, app="kept")
    earlier = msgspec.msgpack.encode({"seen": 0})
    state_key = expectations.keys.state
    fresh_client.execute("HSET", state_key, *(part for n in range(KEYS) for part in (f"k{n}", earlier)))
    kill_often(expectations, "kept", print_figures)
    counts = {row["key"]: int(row["count"]) for row in expectations.outputs()}
    assert len(counts) == KEYS
    for key, count in counts.items():
        assert expectations.stored_state(key) == (2, {"count": count})


def test_no_state_is_lost_before_its_time_or_kept_beyond_it_while_drivers_and_tasks_are_killed(
    fresh_client: Client, folder: Path, print_figures: PrintFigures
) -> None:
    expectations = ExpiringOnSpark(fresh_client, folder, app="lasting")
    kill_often(expectations, "lasting", print_figures, expectations.await_continued)
    assert expectations.begun_anew >= KEYS
