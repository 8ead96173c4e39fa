"""What users learn of a handler that fails: from the log of both engines, and from the keys that wait."""

import re
from typing import Any

import pytest

from millstream import Message, Retry
from millstream.admin.key_queues import skip, unpark
from millstream.delivery.keyed_stream import KeyLease, LeaseRelease
from millstream.delivery.last_error import LastError
from millstream.observability.failure_log import FailureLog
from millstream.redis_client.client import Client
from tests.support.keyed_fixtures import HOUR_MS, KEYS, lease_one, routed
from tests.support.task_fixtures import TaskFixture
from tests.support.waiting import eventually
from tests.support.workers import dead, fill, make, working

pytestmark = [pytest.mark.worker, pytest.mark.keys, pytest.mark.spark]


def fail(message: Message) -> None:
    raise RuntimeError(f"no gateway for {message.text('n')}")


async def fail_async(message: Message) -> None:
    raise RuntimeError(f"no gateway for {message.text('n')}")


def fail_together(messages: list[Message]) -> None:
    raise RuntimeError("no gateway for any")


def failures(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(one.levelname, one.getMessage()) for one in caplog.records if one.name == "millstream.failures"]


def back_off(lease: KeyLease, error: bytes) -> LeaseRelease:
    return LeaseRelease(lease, "backoff", HOUR_MS, 1, error)


def last_error(client: Client, entry_id: str) -> LastError:
    return LastError.parse(client.execute("HGET", KEYS.crashes, entry_id + "e"))


@pytest.mark.parametrize("function", [fail, fail_async])
@pytest.mark.parametrize("key", [None, "n"])
def test_a_worker_logs_each_failed_attempt_and_the_dead_letter(
    client: Client, caplog: pytest.LogCaptureFixture, function: Any, key: str | None
) -> None:
    fill(client, 1)
    with working(client, make(function, key=key)):
        eventually(lambda: dead(client), "the dead letter")
    texts = failures(caplog)
    assert [level for level, _ in texts] == ["WARNING", "WARNING", "ERROR"]
    for number, (_, text) in enumerate(texts[:2], 1):
        assert text.startswith(f"app.handle: attempt {number} of 3 failed on message ")
        assert re.search(r"RuntimeError: no gateway for 0; retrying in [0-9.]+ ms", text)
    assert texts[2][1].startswith("app.handle: dead letter (failed, attempt 3 of 3): message ")
    assert dead(client)[0].id in texts[2][1]


def test_a_worker_logs_the_failure_of_a_batch_for_each_of_its_messages(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, 2)
    with working(client, make(fail_together, retry=Retry(attempts=2, delay_ms=1))):
        eventually(lambda: len(dead(client)) == 2, "the dead letters")
    assert sorted(level for level, _ in failures(caplog)) == ["ERROR", "ERROR", "WARNING", "WARNING"]


def test_a_worker_logs_a_message_that_lacks_its_key_and_one_that_does_not_fit(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, 1)
    with working(client, make(fail, key="custommer")):
        eventually(lambda: dead(client), "the dead letter")
    ((level, text),) = failures(caplog)
    assert level == "ERROR"
    assert text.startswith("app.handle: dead letter (missing-key): message ")
    assert "has no field 'custommer'" in text


def test_a_worker_stores_why_a_key_waits_and_drops_it_with_the_message(client: Client) -> None:
    gate: list[int] = []

    def handle(message: Message) -> None:
        if not gate:
            fail(message)

    client.execute("XADD", "in", "1-0", "k", "A", "n", 1)
    with working(client, make(handle, key="k", retry=Retry(attempts=2, delay_ms=10, then="block"))):
        eventually(lambda: last_error(client, "1-0").error, "the error")
        stored = last_error(client, "1-0")
        gate.append(1)
        eventually(lambda: client.execute("EXISTS", KEYS.crashes) == 0, "the end of the counts")
    assert stored.error == "RuntimeError: no gateway for 1"
    assert (stored.attempts, stored.blocks) == (2, True)
    assert "in fail" in stored.traceback
    assert "attempt.py" not in stored.traceback


def test_a_key_that_a_worker_has_parked_keeps_the_error_until_an_operator_acts(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.execute("XADD", "in", "1-0", "k", "A", "n", 1)
    with working(client, make(fail, key="k", retry=Retry(attempts=1, then="park"))):
        eventually(lambda: client.execute("HLEN", KEYS.parked), "the parked key")
    ((level, text),) = failures(caplog)
    assert (level, text.rpartition("; ")[2]) == ("WARNING", "its key is parked, see: millstream key list app.handle")
    stored = last_error(client, "1-0")
    assert stored.error == "RuntimeError: no gateway for 1"
    assert (stored.attempts, stored.blocks) == (1, False)
    assert "in fail" in stored.traceback
    unpark(client, KEYS, b"kA")
    assert client.execute("EXISTS", KEYS.crashes) == 0


def test_the_dead_letter_of_a_skipped_message_has_its_last_error(client: Client) -> None:
    worker = routed(client, "AB")
    error = LastError(error="RuntimeError: no gateway", traceback="Traceback ...\n  in pay\n").pack()
    lease = lease_one(worker)
    assert worker.release_leases([back_off(lease, error)]) == []
    skip(client, KEYS, b"kA", error="skipped by an operator")
    skip(client, KEYS, b"kB", error="skipped by an operator")
    first, second = dead(client)
    assert first.error == "skipped by an operator; last error: RuntimeError: no gateway"
    assert first.traceback == "Traceback ...\n  in pay\n"
    assert (second.error, second.traceback) == ("skipped by an operator", "")
    assert client.execute("EXISTS", KEYS.crashes) == 0


def test_a_stored_error_is_bounded_and_has_no_traceback_where_many_keys_wait(client: Client) -> None:
    error = LastError(error="x\n\t" * 10_000, traceback="y\n" * 10_000, attempts=10**9 - 1, blocks=True)
    assert len(error.pack()) <= 300 + 30 + 1 + 4_096
    worker = routed(client, "A")
    client.execute("HSET", KEYS.crashes, *(part for n in range(15_000) for part in (f"9-{n}f", 1)))
    lease = lease_one(worker)
    worker.release_leases([back_off(lease, error.pack())])
    stored = last_error(client, "1-0")
    assert (stored.error[:6], stored.traceback) == ("x\\n\\tx", "")
    assert (stored.attempts, stored.blocks) == (10**9 - 1, True)


def test_a_task_on_spark_reports_its_failures_to_the_driver_and_stores_why_a_key_waits(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    bench = TaskFixture(client)
    handler = bench.handler(retry=Retry(attempts=2, delay_ms=1, then="park"))
    client.execute("XADD", "in", "1-0", "n", 1, "k", "A", "fail", 9)
    report = bench.process(handler, bench.rows((1, b"A", {"n": 1, "k": "A", "fail": 9}), (2, b"B", {"n": "x"})))
    assert failures(caplog) == []
    FailureLog(handler).merge(report["failures"])
    texts = failures(caplog)
    assert sorted(level for level, _ in texts) == ["ERROR", "WARNING", "WARNING"]
    assert any(text.endswith("its key is parked, see: millstream key list app.handle") for _, text in texts)
    assert any("dead letter (undecodable)" in text for _, text in texts)
    stored = last_error(client, "1-0")
    assert stored.error == "RuntimeError: attempt 2 fails"
    assert "in handle" in stored.traceback


def test_a_key_that_backs_off_on_spark_keeps_the_error_until_its_message_is_done(client: Client) -> None:
    bench = TaskFixture(client)
    handler = bench.handler(retry=Retry(attempts=3, delay_ms=1_500, jitter=0, max_delay_ms=1_500))
    client.execute("XADD", "in", "1-0", "n", 1, "k", "A", "fail", 1)
    bench.process(handler, bench.rows((1, b"A", {"n": 1, "k": "A", "fail": 1})))
    assert last_error(client, "1-0").error == "RuntimeError: attempt 1 fails"
    client.execute("ZADD", KEYS.backoff, 0, "kA")
    bench.process_deferred(handler)
    assert (bench.outputs(), client.execute("EXISTS", KEYS.crashes)) == ([1], 0)
