"""The page of workers: a row for each, with what it has, when it made progress last, its code and its drain."""

import re
from collections.abc import Iterator

import msgspec
import pytest

from millstream.admin.inspection import inspect
from millstream.admin.worker_reports import WorkerReport, read_workers
from millstream.balancer import Balancer, BalancerPolicy, announce
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import WAITING, HandlerKeys, ServiceKeys
from millstream.services.console import Level
from millstream.worker.static_membership import StaticMembership
from tests.support.consoles import Browser, Page, authorized
from tests.support.keyed_fixtures import keys_in_each_state
from tests.support.running_codes import CODE
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]

STREAMS = 150


@pytest.fixture
def browser(client: Client) -> Iterator[Browser]:
    with authorized(client.url, Level.ADMIN) as opened:
        yield opened


def rows(page: Page) -> list[list[str]]:
    """The cells of each row of the table of workers, without ages, which differ."""
    table = page.html.partition('aria-labelledby="workers"')[2].partition("</table>")[0]
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in table.split("<tr>")[2:]]
    return [[re.sub(r"\s+", " ", re.sub("<[^>]*>", "", cell)).strip() for cell in cells] for cells in found]


def without_ages(cells: list[str]) -> list[str]:
    assert all(re.fullmatch(r"[\d.]+ s|-", one) for one in cells[7:9]), cells
    return [*cells[:7], *cells[9:]]


def add_streams(client: Client, count: int = STREAMS) -> None:
    """A handler on many streams, with one entry of each pending at its worker `w-0`."""
    places = [HandlerKeys("shop", "pay", f"in:{n}") for n in range(count)]
    client.pipeline([("XADD", one.stream, "*", "n", 1) for one in places])
    client.pipeline([("XGROUP", "CREATE", one.stream, one.group, "0") for one in places])
    client.pipeline([("HSET", one.meta, "owner", "workers", "committed_id", "0-0") for one in places])
    client.pipeline([("XREADGROUP", "GROUP", one.group, "w-0", "STREAMS", one.stream, ">") for one in places])


def of(found: list[WorkerReport], name: str) -> WorkerReport:
    return next(one for one in found if one.name == name)


def test_a_worker_with_many_streams_has_one_row(client: Client, browser: Browser) -> None:
    add_streams(client)
    client.execute("XGROUP", "CREATECONSUMER", "in:7", HandlerKeys("shop", "pay", "in:7").group, "w-1")
    row, idle = rows(browser.get("/workers"))
    assert without_ages(row) == ["w-0", "shop", "alive", "1", "0", "0", "150", "-", "-"]
    assert without_ages(idle) == ["w-1", "shop", "alive", "1", "0", "0", "0", "-", "-"]
    assert idle[8] == "-", "it has never got an entry"


def test_a_row_has_the_leased_keys_the_code_and_the_drain_of_a_worker(
    client: Client, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NAME_LEASE_MS", "HELD_MS"):  # the test renews nothing
        monkeypatch.setattr(f"millstream.worker.static_membership.{name}", 3_600_000)
    keys_in_each_state(client)
    newer = msgspec.structs.replace(CODE, source="shop.py 4567cdef", version="1.3.0")
    StaticMembership(client, "shop", "w", handlers={"pay": CODE, "plain": CODE}).acquire(1)
    other = StaticMembership(client, "shop", "v", handlers={"pay": newer})
    other.acquire(2)
    first, second, third = rows(browser.get("/workers"))
    assert without_ages(third) == [
        "w-0",
        "shop",
        "alive",
        "1",
        "0",
        "1",
        "2",
        "shop.py 0123abcd (millstream 1.2.3)",
        "Drain",
    ]
    for n, row in enumerate((first, second)):
        assert row == [
            f"v-{n}",
            "shop",
            "alive",
            "1",
            "0",
            "0",
            "0",
            "-",
            "-",
            "shop.py 4567cdef (millstream 1.3.0)",
            "Drain",
        ]
    other.release()
    page = eventually(lambda: len(rows(one := browser.get("/workers"))) == 1 and one, "the others to be gone")
    assert page
    assert "4567cdef" not in page.text


def test_a_row_has_the_number_of_whole_streams_that_a_worker_has_leased(client: Client, browser: Browser) -> None:
    add_streams(client, 2)
    service = ServiceKeys.of_handler("shop.pay").service
    for n in range(2):
        announce(client, service, f"in:{n}")
    with Balancer(client.url, service, consumer="w-0", policy=BalancerPolicy(lease_ms=60_000)):
        found = eventually(
            lambda: [one for one in rows(browser.get("/workers")) if one[:5] == ["w-0", "shop", "alive", "1", "2"]],
            "the leases",
        )
    assert len(found) == 1


def test_a_worker_that_is_silent_and_still_has_entries_is_shown_and_key_queues_are_no_worker(client: Client) -> None:
    keys_in_each_state(client)
    silent = [msgspec.structs.replace(one, workers=()) for one in inspect(client).handlers]
    found = read_workers(client, silent, []).workers
    assert [(one.name, one.is_alive, one.pending, one.leased_keys) for one in found] == [("w-0", False, 2, 1)]
    assert WAITING != "w-0"
    client.execute("HSET", HandlerKeys("shop", "pay", "orders").owners, "kz", "damaged")
    assert len(read_workers(client, silent, []).workers) == 1


def test_where_the_time_does_not_suffice_the_streams_with_pending_entries_are_read_first(client: Client) -> None:
    add_streams(client)
    last = HandlerKeys("shop", "pay", "in:149")
    client.pipeline([("XACK", f"in:{n}", last.group, *ids(client, f"in:{n}")) for n in range(149)])
    found = read_workers(client, inspect(client).handlers, [], budget_ms=0)
    assert (found.searched, found.total) == (100, STREAMS)
    assert of(list(found.workers), "w-0").pending == 1


def ids(client: Client, stream: str) -> list[bytes]:
    return [entry_id for entry_id, _ in client.execute("XRANGE", stream, "-", "+")]
