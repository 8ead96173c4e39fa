"""Every operation of a router in Redis, and those of `millstream serve`."""

from millstream.model import Message
from millstream.redis_client.client import Client
from millstream.router import Gap, Router
from tests.support.waiting import FAIL_SAFE_S


def follow(url: str, admin: Client) -> None:
    """Run every operation once."""
    with Client(url) as client, Router(url, reader="tracking") as router:
        client.execute("PING")
        for n in range(2):
            admin.execute("XADD", "orders", "*", "n", n)
        with router.subscribe("orders") as subscription:
            assert all(isinstance(subscription.get(1_000 * FAIL_SAFE_S), Message) for _ in range(2))
            admin.execute("XADD", "{orders.b}", "1-1", "n", 1)
            admin.execute(
                "RENAME", "{orders.b}", "orders"
            )  # a stream that ends before the cursor: a gap, shown by its old entries
            assert isinstance(subscription.get(1_000 * FAIL_SAFE_S), Gap)
            assert isinstance(subscription.get(1_000 * FAIL_SAFE_S), Message)
