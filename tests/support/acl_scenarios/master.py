"""Every operation of a master in Redis, in its loop and for its consumers, and of the consumers."""

import threading
from dataclasses import replace
from typing import Any

from millstream.admin.key_queues import list_queues
from millstream.admin.server_checks import warn_of_data_loss
from millstream.clock import SYSTEM_CLOCK
from millstream.delivery.reliable_stream import ReliableStream
from millstream.model import Retry
from millstream.observability.health import Progress
from millstream.redis_client.client import Client
from millstream.services.master.acknowledgements import Acknowledger, AckRequest
from millstream.services.master.delegated_consumer import ACK_OWNED
from millstream.services.master.delegation import Delegator
from millstream.services.master.delegation_loop import DelegationLoop
from millstream.services.master.queries import Queries
from millstream.services.master.registry import Registry
from millstream.services.master.settings import MasterSettings
from tests.support.waiting import eventually

SETTINGS = MasterSettings(
    ticket_stream="orders", group="bill", claim_idle_ms=1, max_tickets=10, retry=Retry(attempts=2, delay_ms=1, jitter=0)
)
KEYS = SETTINGS.keys


class FewRounds(Progress):
    """The progress that ends the loop after three iterations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.over = threading.Event()
        self._count = 0

    def on_read(self) -> None:
        super().on_read()
        self._count += 1
        if self._count == 3:
            self.over.set()


def publish(admin: Client, *tickets: str) -> list[str]:
    return [admin.execute("XADD", "orders", "*", "ticket_id", ticket).decode() for ticket in tickets]


def give(delegator: Delegator, registry: Registry, name: str, count: int = 10) -> list[str]:
    """Register a consumer with a new incarnation; return the ids assigned to it."""
    found = registry.register(name, health_url=None, max_tickets=10, instance="", silent_ms=1)
    delegator.group_stream.enqueue_new(count=100, max_pending=1_000)
    return [one.decode() for one in delegator.assign(name, found, count=count)]


def direct(url: str, admin: Client) -> None:
    """Every operation of a master, which first takes over from workers of another kind."""
    with Client(url) as client:
        warn_of_data_loss(client)
        registry = Registry(client, KEYS)
        delegator = Delegator(client, registry, SETTINGS)
        publish(admin, "A")
        before = ReliableStream(admin, "orders", app="master", handler="bill", consumer="w")
        before.join()
        before.fetch(count=1)
        delegator.join()
        admin.execute("XGROUP", "DESTROY", "orders", KEYS.group)
        delegator.group_stream.refresh()
        take_in(client, delegator, registry, admin)
        look_after(client, delegator, registry, admin)
        take_over(client, admin)
        views = Queries(client, registry, SETTINGS)
        assert views.consumers(None, 10).consumers
        views.tickets(None, 10)
        list_queues(client, KEYS)
        rounds = FewRounds(read_within_ms=1_000, run_within_ms=1_000, clock=SYSTEM_CLOCK)
        DelegationLoop(url, delegator, registry, SETTINGS, progress=rounds).run(rounds.over)


def acknowledge(client: Client, delegator: Delegator, name: str, message_id: str) -> int:
    """The number of messages that this acknowledges."""
    (found,) = Acknowledger(client, Registry(client, KEYS), delegator).acknowledge(
        [AckRequest(name, [message_id.encode()])]
    )
    return found.newly_acked


def take_in(client: Client, delegator: Delegator, registry: Registry, admin: Client) -> None:
    """The calls of consumers about their messages; the first acknowledges as many as the list of done messages keeps."""
    admin.execute("HSET", f"{KEYS.base}:done", *(part for number in range(19_999) for part in (number, "c9")))
    publish(admin, "A", "A", "B", "C", "D")
    a, b, c, d = give(delegator, registry, "c1")
    assert acknowledge(client, delegator, "c1", a)
    delegator.fail("c1", b, "why")
    delegator.fail("c1", c, "why", retry=False)
    delegator.release("c1", d)
    delegator.release("c1")
    while delegator.group_stream.enqueue_new(count=100, max_pending=1_000):
        pass


def look_after(client: Client, delegator: Delegator, registry: Registry, admin: Client) -> None:
    """Messages whose consumers die at every attempt, or acknowledge without a call to the master."""
    (lost,) = publish(admin, "E")
    for _ in range(2):
        assert lost in give(delegator, registry, "c2")
        give(delegator, registry, "c2", count=0)
        delegator.group_stream.renew_consumer_leases()
    (done,) = publish(admin, "F")
    delegator.group_stream.enqueue_new(count=100, max_pending=1_000)
    admin.execute("XACK", "orders", KEYS.group, done)
    assert acknowledge(client, delegator, "c2", done)


def take_over(client: Client, admin: Client) -> None:
    """Claim idle messages of other consumers, older than those already in their key queue."""
    settings = replace(SETTINGS, group="ship")
    admin.execute("XGROUP", "CREATE", "orders", "ship", "$", "MKSTREAM")
    (older,) = publish(admin, "A")
    admin.execute("XREADGROUP", "GROUP", "ship", "outsider", "STREAMS", "orders", ">")
    delegator = Delegator(client, Registry(client, settings.keys), settings)
    delegator.join()
    publish(admin, "A")
    delegator.group_stream.enqueue_new(count=100, max_pending=1_000)
    eventually(
        lambda: delegator.group_stream.claim_idle_messages(0.0) == [older.encode()], "the entry to have been idle"
    )


def consume(url: str, admin: Client) -> None:
    """Every operation of a consumer of a master."""
    publish(admin, "A")
    delegator, registry = Delegator(admin, Registry(admin, KEYS), SETTINGS), Registry(admin, KEYS)
    delegator.join()
    (given,) = give(delegator, registry, "c1")
    with Client(url) as client:
        found = client.execute("XREADGROUP", "GROUP", KEYS.group, "c1", "COUNT", 10, "STREAMS", "orders", "0")
        assert found[0][1][0][0].decode() == given
        assert client.script(ACK_OWNED, ("orders",), (KEYS.group, "c1", given)) == 1
