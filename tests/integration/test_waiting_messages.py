"""How many messages of an app wait, also where Redis does not know the lag of a group."""

import pytest

from millstream import App, Message
from millstream.admin import waiting_messages
from millstream.admin.key_queues import park
from millstream.admin.waiting_messages import Waiting, WaitingMessages
from millstream.delivery.keyed_stream import LeaseRelease
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.clocks import ManualClock
from tests.support.keyed_fixtures import HOUR_MS, KEYS, lease_keys, routed
from tests.support.workers import double, make

pytestmark = [pytest.mark.worker, pytest.mark.groups]

COUNT = 4_000


def of_workers_after_spark(client: Client, *, parked: int = 0) -> WaitingMessages:
    """The messages of a handler on a backlog, within which its group was set; the time to count them has passed."""
    app = App("app")

    @app.handler("in", name="work")
    def work(message: Message) -> None: ...

    keys = HandlerKeys("app", "work", "in")
    ids = client.pipeline([("XADD", "in", "*", "n", n) for n in range(COUNT + 10)])
    client.execute("XGROUP", "CREATE", "in", keys.group, "0")
    client.execute("XGROUP", "SETID", "in", keys.group, ids[9])
    client.execute("HSET", keys.meta, "owner", "keyed" if parked else "workers")
    if parked:
        client.execute("HSET", keys.parked, "kA", "by hand")
        client.execute("RPUSH", keys.queue(b"kA"), *ids[-parked:])
    clock = ManualClock()
    clock.step_ms = 1_000
    return WaitingMessages(client, app.handlers.values(), clock=clock)


def test_a_lag_that_redis_does_not_know_is_counted_until_the_limit_is_passed(client: Client) -> None:
    waiting = of_workers_after_spark(client)
    found = waiting.count(2_500)
    assert found.is_partial
    assert 2_500 <= found.count < COUNT


def test_a_lag_below_the_limit_is_counted_to_its_end(client: Client) -> None:
    assert of_workers_after_spark(client).count(COUNT + 1) == Waiting(COUNT)


def test_messages_of_keys_that_no_engine_would_run_now_do_not_count(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_messages, "_NAMES_AT_ONCE", 2)
    worker = routed(client, "AABBCCDDEEFF")
    waiting = WaitingMessages(client, [make(double, key="k")])
    assert waiting.count(1_000) == Waiting(12)
    leases = {one.queue: one for one in lease_keys(worker).leases}
    worker.release_leases([LeaseRelease(leases[name], "backoff", HOUR_MS, 1, b"") for name in (b"kA", b"kB", b"kC")])
    for name in (b"kC", b"kD"):
        park(client, KEYS, name, "by hand")
    assert waiting.count(1_000) == Waiting(4), "of E and F, which are leased"
    worker.release_leases([LeaseRelease(leases[name], "return") for name in (b"kD", b"kE")])
    assert waiting.count(1_000) == Waiting(4)
    client.execute("ZADD", KEYS.backoff, "XX", "1", b"kA")  # its back-off is over: the next engine that looks runs it
    assert waiting.count(1_000) == Waiting(6)


def test_a_lag_that_redis_does_not_know_is_counted_on_where_messages_of_parked_keys_are_among_it(
    client: Client,
) -> None:
    assert of_workers_after_spark(client, parked=400).count(2_900).count >= 2_900
