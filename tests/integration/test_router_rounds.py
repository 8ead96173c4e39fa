"""What a router reads in each round, step by step against a real server: its pauses, the order of its queues, its budget."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.router import END
from tests.support.routers import ids, ids_in, publish, take_items
from tests.support.stepped_router import SteppedRouter, reads_of, stepped_router

pytestmark = [pytest.mark.router]

NAMES = [f"s{n}" for n in range(100)]
MANY_STEPS = 50
FIRST_STEPS = 10
"""In these a stream is also read for its counters, and again for the size of its entries."""
LARGE = 100_000


@pytest.fixture
def small_table() -> Iterator[Client]:
    """A client of a server that can track no more than 20 keys."""
    with EmbeddedServer(extra={"tracking-table-max-keys": "20"}) as server, Client(server.url) as client:
        yield client


def is_pausing(stepped: SteppedRouter, client: Client) -> bool:
    """Whether the router reads nothing in a step, though Redis has reported streams."""
    before = reads_of(client)
    stepped.step()
    return reads_of(client) == before and any(stepped.reader._queues)


def is_at_budget(stepped: SteppedRouter) -> bool:
    """Whether the router is at its budget after a step."""
    stepped.step()
    return stepped.is_at_budget


def test_a_router_whose_streams_redis_evicts_from_its_tracking_table_pauses_between_reads(small_table: Client) -> None:
    publish(small_table, NAMES, [1])
    with stepped_router(small_table.url) as stepped:
        subscriptions = [stepped.router.subscribe(name) for name in NAMES]
        stepped.settle()
        for _ in range(3):  # pauses
            assert any(is_pausing(stepped, small_table) for _ in range(MANY_STEPS))
            publish(small_table, NAMES[:1], [2])
            assert all(is_pausing(stepped, small_table) for _ in range(MANY_STEPS)), "until time passes"
            stepped.end_pause()
            assert not is_pausing(stepped, small_table)
        for _ in range(MANY_STEPS):
            stepped.step()
            stepped.end_pause()
        assert sum(one.buffered for one in subscriptions) == len(NAMES) + 3
        assert ids(take_items(subscriptions[0], 4)) == ids_in(small_table, NAMES[0])


def test_the_queues_of_changed_and_of_other_streams_alternate_while_one_request_is_sent_at_a_time(
    client: Client,
) -> None:
    """As after broken connections: neither a long history nor streams that change all the time keep the other waiting."""
    publish(client, ["history"], range(1_000))
    with stepped_router(client.url, count=5) as stepped:
        busy = stepped.router.subscribe("busy", after=END)
        stepped.settle()
        for _ in range(3):
            stepped.step()
        for _ in range(2):
            stepped.reader._read_size.on_break()
        history = stepped.router.subscribe("history")
        read = []
        for number in range(MANY_STEPS):
            publish(client, ["busy"], [number])
            stepped.settle()
            before = history.buffered, busy.buffered
            stepped.step()
            read.append((history.buffered > before[0], busy.buffered > before[1]))
        last = read[FIRST_STEPS:]
        assert set(last) == {(True, False), (False, True)}, "one request at a time"
        assert all(one != following for one, following in pairwise(last))


def test_a_router_at_its_budget_reads_ahead_again_as_soon_as_a_quarter_of_it_is_free(client: Client) -> None:
    client.pipeline([("XADD", "s", "*", "n", "x" * LARGE) for _ in range(60)])
    with stepped_router(client.url, budget_bytes=10 * LARGE) as stepped:
        subscription = stepped.router.subscribe("s", buffer_bytes=100 * LARGE)
        stepped.settle()
        assert any(is_at_budget(stepped) for _ in range(MANY_STEPS))
        there = subscription.buffered
        assert ids(take_items(subscription, there)) == ids_in(client, "s")[:there]
        for _ in range(MANY_STEPS):
            stepped.step()
        more = subscription.buffered
        assert more > 1, "though no time has passed; at its budget it reads one message at a time"
        assert ids(take_items(subscription, more)) == ids_in(client, "s")[there : there + more]
