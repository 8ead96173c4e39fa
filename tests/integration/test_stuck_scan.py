"""The search for what is stuck continues where it has stopped, also on a Redis with many keys."""

from pathlib import Path

import pytest

from millstream.admin.stuck_places import StuckPlaces, StuckScan
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from tests.support.clocks import ManualClock
from tests.support.console_parts import console_with
from tests.support.consoles import fill_with
from tests.support.deployments import lent_cluster

pytestmark = [pytest.mark.cli]

MOST_RUNS = 1_000


def place(n: int) -> HandlerKeys:
    return HandlerKeys("shop", "pay", f"in:{n:03}")


def add(client: Client, *numbers: int) -> None:
    """Parked keys of a handler on these streams."""
    client.pipeline([("HSET", place(n).parked, "ka", "1 broken") for n in numbers])


def fill(client: Client, count: int = 10_000) -> None:
    """Keys of another program."""
    client.pipeline([("SET", f"other:{n}", n) for n in range(count)])


def rounds_of(scan: StuckScan, *clients: Client) -> list[StuckPlaces]:
    """What the scans of one round return, by the clients in turn; no part may be left of the round before."""
    found = [scan.run(clients[0])]
    while scan._position != (0, b"0"):
        found.append(scan.run(clients[len(found) % len(clients)]))
        assert len(found) < MOST_RUNS
    return found


def test_each_scan_continues_and_keeps_what_was_found_until_its_part_is_scanned_again(client: Client) -> None:
    add(client, *range(20))
    fill(client)
    clock = ManualClock()
    scan = StuckScan(most=1_000, budget_ms=0, clock=clock)
    first = rounds_of(scan, client)
    assert len(first) > 5
    assert [one.is_partial for one in first] == [True] * (len(first) - 1) + [False]
    assert [len(one.found) for one in first] == sorted(len(one.found) for one in first)
    assert first[-1].found == [place(n) for n in range(20)]
    client.execute("DEL", *(place(n).parked for n in range(10)))
    add(client, *range(20, 30))
    clock.now_ms += 60_000
    later = rounds_of(scan, client)
    assert all(set(one.found) >= {place(n) for n in range(20)} for one in later[:-1])
    assert later[-1].found == [place(n) for n in range(10, 30)]
    assert not any(one.is_partial for one in later)
    assert {one.age_ms for one in later[:-1]} == {60_000.0}
    assert (first[-1].age_ms, later[-1].age_ms) == (0.0, 0.0)


def test_a_scan_of_all_keys_at_once_misses_nothing_and_begins_anew(client: Client) -> None:
    scan = StuckScan(most=1_000, budget_ms=3_600_000)
    fill(client)
    for n in range(3):
        add(client, n)
        assert scan.run(client) == StuckPlaces(found=[place(m) for m in range(n + 1)], is_partial=False, age_ms=None)


def test_of_too_many_places_those_that_were_found_first_are_kept_until_they_are_stuck_no_more(client: Client) -> None:
    add(client, *range(30))
    fill(client, 3_000)
    scan = StuckScan(most=10, budget_ms=0)
    first = rounds_of(scan, client)[-1]
    assert (len(first.found), first.is_partial) == (10, True)
    assert all(one.found == first.found for one in rounds_of(scan, client))
    client.execute("DEL", *(keys.parked for keys in first.found[:4]))
    rounds_of(scan, client)
    later = rounds_of(scan, client)[-1]
    assert (len(later.found), later.is_partial) == (10, True)
    assert set(first.found) & set(later.found) == set(first.found[4:])


def test_a_scan_begins_anew_once_another_process_serves_as_its_cursor_is_of_the_earlier_one(tmp_path: Path) -> None:
    with EmbeddedServer(data_dir=tmp_path) as server, Client(server.url) as client:
        add(client, *range(6_000))
        scan = StuckScan(most=10_000, budget_ms=0)
        before = [scan.run(client) for _ in range(3)][-1]
        server.restart()
        client.close()
        client.execute("DEL", before.found[0].parked)
        later = rounds_of(scan, client)
    assert set(later[0].found) > set(before.found)
    assert [one.is_partial for one in later] == [True] * (len(later) - 1) + [False]
    assert (len(later[-1].found), before.found[0] in later[-1].found) == (5_999, False)


def test_several_clients_continue_the_scan_of_a_cluster(request: pytest.FixtureRequest) -> None:
    deployed = lent_cluster(request)
    with Client(deployed.url) as client, Client(deployed.url) as other:
        add(client, *range(50))
        fill(client)
        found = rounds_of(StuckScan(most=1_000, budget_ms=0), client, other)
    assert len(found) > 3
    assert found[-1].found == [place(n) for n in range(50)]


def test_the_page_of_what_is_stuck_continues_its_search_at_each_read(client: Client, tmp_path: Path) -> None:
    fill_with(client, "x")
    fill(client)
    stuck = StuckScan(most=1_000, budget_ms=0)
    with console_with(client.url, tmp_path, "payloads", stuck=stuck) as (parts, browser):
        texts = [browser.get("/stuck").text]
        while "There may be more" in texts[-1]:
            parts.shared.clear()
            texts.append(browser.get("/stuck").text)
            assert len(texts) < MOST_RUNS
    assert len(texts) > 5
    assert "or reload, the search goes on from where it has stopped" in texts[0]
    assert "parked x shop.pay parked 3" in texts[-1]
    assert "what got stuck since 20" in texts[-1]
    assert "shop.pay 1 1" in texts[-1], "the dead letter"
