"""Every operation of an exporter in Redis, which only reads."""

from millstream.admin.handler_figures import HandlerFigures, add_figures
from millstream.admin.redis_metrics import all_places
from millstream.clock import SYSTEM_CLOCK
from millstream.redis_client.client import Client
from tests.support.acl_scenarios.worker import KEYS, add, letter, reliable
from tests.support.keyed_fixtures import keys_in_each_state


def export(url: str, admin: Client) -> None:
    """The figures of a handler without a key, with a dead letter and a lag to count, and of one with keys."""
    stream = reliable(admin)
    stream.join()
    ids = add(admin, 5)
    stream.dead_letter((stream.fetch(count=1)[0], letter()))
    admin.execute("XDEL", "orders", ids[3])
    read_all(url, [KEYS.handler])
    admin.execute("FLUSHDB")
    add(admin, 1)
    unread = reliable(admin)
    unread.join()
    read_all(url, [KEYS.handler])
    admin.execute("FLUSHDB")
    keys_in_each_state(admin)
    read_all(url, ["pay"])


def read_all(url: str, handlers: list[str]) -> None:
    """Find these handlers, and read their figures."""
    with Client(url) as client:
        places = all_places(client)
        assert list(places) == [f"shop.{name}" for name in handlers]
        for some in places.values():
            add_figures(client, some, HandlerFigures(), SYSTEM_CLOCK)
