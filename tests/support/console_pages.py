"""Every page of the console, and data that fills each."""

from millstream.admin.figure_history import STEP_MS, FigureHistory
from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import server_time_ms
from tests.support.consoles import add_output, fill_with
from tests.support.sweeps import swept

PAGES = (
    *(
        "/",
        "/stuck",
        "/handlers",
        "/handler?name=shop.pay",
        "/key?handler=shop.pay&key=parked+x",
        "/letters?handler=shop.pay",
        "/streams",
    ),
    *("/stream?name=orders", "/workers", "/queries", "/delayed", "/delayed?stream=orders", "/redis", "/audit"),
    *(
        "/tail?name=orders",
        "/find?q=o",
        "/group?stream=orders&group=readers",
        "/letter?handler=shop.pay&stream=orders&id=2-0",
        "/letter/edit?handler=shop.pay&stream=orders&id=2-0",
    ),
)
"""The address of each page, on the data of `fill_pages`."""

EMPTY_PAGES = (
    "/",
    "/stuck",
    "/handlers",
    "/streams",
    "/workers",
    "/queries",
    "/delayed",
    "/redis",
    "/audit",
    "/find",
    "/find?q=o",
)
"""Those that have something to say about a Redis without any data."""


def fill_pages(client: Client) -> None:
    """What each page shows: the data of `fill_with`, an output, a group, a dead letter `2-0`, and a history with a gap."""
    fill_with(client, "x")
    add_output(client, "x")
    Group(client, "orders", "readers").create()
    letters = HandlerKeys("shop", "pay", "orders").dead_letters
    ((_, letter),) = client.execute("XRANGE", letters, "-", "+")
    client.execute("DEL", letters)
    client.execute("XADD", letters, "2-0", *letter)
    for minutes in (40, 3, 2):
        at_ms = server_time_ms(client) - minutes * STEP_MS
        FigureHistory(client).add(swept(client, at_ms))
