"""Dead letters of one handler, `shop.pay` on `orders` unless said otherwise, and what is left of them."""

from collections.abc import Sequence

from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys

KEYS = HandlerKeys("shop", "pay", "orders")


def add_dead_letter(
    client: Client,
    pairs: Sequence[bytes],
    error: str = "ValueError: no",
    keys: HandlerKeys = KEYS,
    entry_id: str = "1-0",
) -> str:
    """Add a dead letter with these fields, of the entry `entry_id`; return its id."""
    letter = DeadLetter(
        stream=keys.stream,
        id=entry_id,
        pairs=pairs,
        key=b"ann",
        app=keys.app,
        handler=keys.handler,
        attempts=1,
        reason="failed",
        error=error,
        time_ms=1,
    )
    found: bytes = client.execute("XADD", keys.dead_letters, "*", *letter.items())
    return found.decode()


def entries(client: Client) -> list[list[bytes]]:
    """Return the fields of each entry of the stream."""
    return [pairs for _, pairs in client.execute("XRANGE", "orders", "-", "+")]


def left(client: Client) -> int:
    """Return how many dead letters there are."""
    return int(client.execute("XLEN", KEYS.dead_letters))
