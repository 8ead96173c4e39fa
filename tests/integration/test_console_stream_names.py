"""The list of streams: one scan of all names for all prefixes and viewers, the older names meanwhile, and its limits."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.services.console import Level
from millstream.services.console.stream_names import StreamNames
from tests.support.command_stats import commands_run
from tests.support.console_parts import HOUR_MS, console_with
from tests.support.consoles import authorized, fill_with
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]


class HeldClock:
    """A clock that the test moves. A thread of its own that asks it waits while `go_on` is not set."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.go_on = threading.Event()

    def monotonic_ms(self) -> float:
        if threading.current_thread() is not threading.main_thread():
            assert self.go_on.wait(FAIL_SAFE_S)
        return self.now_ms

    def sleep_ms(self, duration_ms: float) -> None:
        """Never called."""
        raise AssertionError(duration_ms)


@pytest.fixture
def filled(fresh_client: Client) -> Client:
    for name in ("a1", "a2", "b"):
        fresh_client.execute("XADD", name, "*", "n", 1)
    return fresh_client


@pytest.fixture
def clock() -> Iterator[HeldClock]:
    """At the end of the test no scan waits for it."""
    made = HeldClock()
    yield made
    made.go_on.set()


def shown(names: StreamNames, prefix: str) -> tuple[list[str], bool]:
    found = names.find(prefix)
    assert found is not None
    return [*found.names], found.is_partial


def test_one_scan_finds_the_names_for_all_prefixes(filled: Client) -> None:
    names = StreamNames(filled.url, keep_ms=HOUR_MS, wait_ms=HOUR_MS)
    before = commands_run(filled.execute)["scan"]
    assert shown(names, "a") == (["a1", "a2"], False)
    assert shown(names, "a2") == (["a2"], False)
    assert shown(names, "") == (["a1", "a2", "b"], False)
    assert shown(names, "c") == ([], False)
    assert commands_run(filled.execute)["scan"] == before + 1


def test_the_older_names_are_found_while_a_scan_runs_unless_they_are_too_old(filled: Client, clock: HeldClock) -> None:
    names = StreamNames(filled.url, wait_ms=1, clock=clock)
    eventually(lambda: shown(names, "a") == (["a1", "a2"], True), "the names read so far")
    clock.go_on.set()
    eventually(lambda: shown(names, "a") == (["a1", "a2"], False), "all names")
    clock.go_on.clear()
    filled.execute("XADD", "a3", "*", "n", 1)
    clock.now_ms = 6_000
    found = names.find("a")
    assert found is not None
    assert (list(found.names), found.is_partial, found.age_ms) == (["a1", "a2"], False, 6_000)
    clock.go_on.set()
    eventually(lambda: shown(names, "a")[0] == ["a1", "a2", "a3"], "the new name")
    clock.go_on.clear()
    clock.now_ms = 200_000
    assert shown(names, "a")[1], "the older names are too old: these are those read so far"


def test_names_of_a_scan_of_many_pages_count_as_new_for_longer(fresh_client: Client, clock: HeldClock) -> None:
    clock.go_on.set()
    fresh_client.pipeline([("SET", f"key{n}", 1) for n in range(70_000)])
    names = StreamNames(fresh_client.url, wait_ms=HOUR_MS, clock=clock)
    before = commands_run(fresh_client.execute)["scan"]
    assert shown(names, "") == ([], False)
    pages = commands_run(fresh_client.execute)["scan"] - before
    assert pages >= 70
    for now_ms, scanned in ((pages * 100.0 - 1, pages), (pages * 100.0, 2 * pages)):
        clock.now_ms = now_ms
        names.find("")
        eventually(lambda wanted=scanned: commands_run(fresh_client.execute)["scan"] - before == wanted, "the scans")  # type: ignore[misc]


def test_too_many_streams_are_searched_by_prefix(filled: Client, tmp_path: Path) -> None:
    names = StreamNames(filled.url, wait_ms=HOUR_MS, most=2)
    assert names.find("a") is None
    with console_with(filled.url, tmp_path, names=names) as (_, browser):
        assert "2 found, these are 1 to 2." in browser.get("/streams?prefix=a").text
        assert "Redis had these streams at" not in browser.get("/streams?prefix=a").text


def test_the_list_says_of_when_it_is_and_has_the_streams_of_millstream_only_by_their_prefix(client: Client) -> None:
    fill_with(client, "x")
    with authorized(client.url, Level.FIGURES) as browser:
        page = browser.get("/streams")
        assert "1 found, these are 1 to 1. Redis had these streams at 2" in page.text
        own = browser.get("/streams?prefix=millstream:")
        assert "millstream:console:audit" in own.text


def test_a_scan_that_fails_is_an_error_and_the_next_request_scans_again() -> None:
    with EmbeddedServer() as server:
        names = StreamNames(server.url, wait_ms=HOUR_MS)
        server.stop()
        with pytest.raises(Unavailable):
            names.find("")
        server.start()
        assert shown(names, "") == ([], False)
