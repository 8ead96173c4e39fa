"""How many messages of an app wait, also where Redis does not know the lag of a group."""

import pytest

from millstream import App, Message
from millstream.admin.waiting_messages import Waiting, WaitingMessages
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.clocks import ManualClock

pytestmark = [pytest.mark.worker, pytest.mark.groups]

COUNT = 4_000


def of_workers_after_spark(client: Client) -> WaitingMessages:
    """The messages of a handler on a backlog, within which its group was set; the time to count them has passed."""
    app = App("app")

    @app.handler("in", name="work")
    def work(message: Message) -> None: ...

    keys = HandlerKeys("app", "work", "in")
    ids = client.pipeline([("XADD", "in", "*", "n", n) for n in range(COUNT + 10)])
    client.execute("XGROUP", "CREATE", "in", keys.group, "0")
    client.execute("XGROUP", "SETID", "in", keys.group, ids[9])
    client.execute("HSET", keys.meta, "owner", "workers")
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
