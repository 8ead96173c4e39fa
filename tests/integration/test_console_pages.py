"""What the pages of the console show: the sentences and figures of the commands."""

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import httpx
import msgspec
import pytest

from millstream.balancer import Balancer, BalancerPolicy, announce
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.query_progress import QueryProgress, report_progress
from millstream.delivery.reliable_stream import ReliableStream
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys, query_progress_key, run_name, stage_group, worker_name_key
from millstream.redis_client.pipelining import server_time_ms
from millstream.services.console import Level, console_app
from millstream.services.console.pages import Shared
from millstream.spark.run.liveness import announce_run
from tests.support.consoles import BASE, Browser, Page, authorized, console, fill_with, pages_reached
from tests.support.deployments import lent_cluster
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import double, fill, make, outputs, pending, working

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]


@contextmanager
def replaced(client: Client, key: str) -> Iterator[None]:
    """Let a key hold another type of value for the block."""
    held = client.execute("DUMP", key)
    client.execute("DEL", key)
    client.execute("SET", key, "x")
    try:
        yield
    finally:
        client.execute("DEL", key)
        if held is not None:
            client.execute("RESTORE", key, 0, held)


@pytest.fixture
def browser(client: Client) -> Iterator[Browser]:
    with authorized(client.url, Level.ADMIN) as opened:
        yield opened


def test_the_overview_says_that_all_is_well_where_it_is(client: Client, browser: Browser) -> None:
    assert "No handler has run on this Redis yet." in browser.get("/").text
    fill(client, 3)
    with working(client, make(double)):
        eventually(lambda: len(outputs(client)) == 3 and pending(client) == 0)
        page = eventually(lambda: "app.handle running" in (one := browser.get("/")).text and one, "a new overview")
    assert page
    assert "All handlers keep up. No entry waits." in page.text


def test_the_overview_says_what_needs_attention_since_when_and_the_command(client: Client, browser: Browser) -> None:
    ReliableStream(client, "in", app="app", handler="handle", consumer="gone").join()
    client.execute("XADD", "in", f"{server_time_ms(client) - 3_600_000}-0", "n", 1)
    page = browser.get("/")
    assert "problem app.handle: 1 entry waits, the oldest for " in page.text
    assert "nothing processes them. Since 20" in page.text
    assert "Show millstream worker FILE.py" in page.text
    assert "/handler?name=app.handle" in page.links


def test_every_link_leads_to_a_page_and_each_page_has_one_heading(client: Client, browser: Browser) -> None:
    fill_with(client, "x")
    seen = pages_reached(browser)
    assert [path for path, page in seen.items() if page.status != 200] == []
    assert [path for path, page in seen.items() if page.html.count("<h1>") != 1] == []
    paths = {path.partition("?")[0] for path in seen}
    assert paths == {
        *(
            "/",
            "/stuck",
            "/handlers",
            "/handler",
            "/key",
            "/letters",
            "/letter",
            "/letter/edit",
            "/streams",
            "/stream",
            "/tail",
        ),
        *("/group", "/workers", "/queries", "/delayed", "/redis", "/audit"),
    }


def test_streams_are_found_by_prefix_a_hundred_at_a_time(client: Client, browser: Browser) -> None:
    client.pipeline([("XADD", f"device:{n:03}", "*", "n", n) for n in range(250)])
    client.execute("XADD", "a*b[c", "*", "n", 1)
    client.execute("XADD", "a9bc", "*", "n", 1)
    page = browser.get("/streams?prefix=device:")
    assert "250 found, these are 1 to 100." in page.text
    names = []
    while True:
        names += [one.partition("name=device%3A")[2] for one in page.links if "name=device" in one]
        following = [one for one in page.links if "after=" in one and "refresh" not in one]
        if not following:
            break
        page = browser.get(following[0])
    assert names == [f"{n:03}" for n in range(250)]
    assert "1 found" in browser.get("/streams?prefix=a*b[").text
    assert "0 found" in browser.get("/streams?prefix=nothing").text


def test_the_longest_oldest_and_latest_streams_come_first_if_that_is_asked_for(
    client: Client, browser: Browser
) -> None:
    client.pipeline([("XADD", f"calls:{name}", f"{n}-0", "n", n) for name in "abc" for n in range(ord(name), 130)])
    for name, read in (("a", 33), ("b", 2), ("c", 0)):
        client.execute("XGROUP", "CREATE", f"calls:{name}", "g", 0)
        client.execute("XGROUP", "CREATE", f"calls:{name}", "done", "$")
        if read:
            client.execute("XREADGROUP", "GROUP", "g", "w", "COUNT", read, "STREAMS", f"calls:{name}", ">")
    client.execute("XACK", "calls:a", "g", *(f"{n}-0" for n in range(97, 120)))
    client.execute("XADD", "calls:d", "200-0", "n", 1)
    page = browser.get("/streams?prefix=calls:")
    assert rows(page) == [("a", "10"), ("b", "32"), ("c", "31"), ("d", "-")]
    for order, names in (("lag", "bcad"), ("entries", "abcd"), ("oldest", "abcd")):
        page = browser.get(next(one for one in page.links if f"order={order}" in one))
        assert "".join(name for name, _ in rows(page)) == names, order
    own = browser.get("/streams?prefix=millstream:&order=lag")
    assert "Give a beginning" not in own.text, "they are few"


def rows(page: Page) -> list[tuple[str, str]]:
    """The names after `calls:`, and the lags, of a list of streams."""
    found = re.findall(r"name=calls%3A(\w+)\".*?<td class=\"n\">([-0-9,]+)</td>\s*</tr>", page.html, re.DOTALL)
    return [(name, lag) for name, lag in found]


def test_the_entries_of_a_stream_are_read_from_an_id_or_a_time_on(client: Client, browser: Browser) -> None:
    now_ms = server_time_ms(client)
    client.pipeline([("XADD", "in", f"{n}-0", "n", f"old{n}") for n in range(1, 121)])
    client.execute("XADD", "in", f"{now_ms}-0", "n", "fresh")
    page = browser.get("/stream?name=in")
    assert "n old50" in page.text
    assert "old51" not in page.text
    link = next(one for one in page.links if "from=51-0" in one and "refresh" not in one)
    assert "old51" in browser.get(link).text
    page = browser.get("/stream?name=in&from=15m")
    assert ("fresh" in page.text, "old120" in page.text) == (True, False)
    assert "fresh" in browser.get("/stream?name=in&from=latest").text
    client.execute("XGROUP", "CREATE", "in", "readers", "0")
    client.execute("XREADGROUP", "GROUP", "readers", "me", "COUNT", 3, "STREAMS", "in", ">")
    assert "me readers 3 " in browser.get("/stream?name=in").text
    assert browser.get("/stream?name=in&from=nonsense").status == 400
    assert browser.get("/stream?name=gone").status == 404


def test_large_entries_are_read_a_million_bytes_at_a_time(client: Client, browser: Browser) -> None:
    client.pipeline([("XADD", "in", f"{n}-0", "n", b"x" * 400_000) for n in range(1, 9)])
    page = browser.get("/stream?name=in")
    assert (page.text.count("more characters are not shown"), "/stream?name=in&from=4-0" in page.links) == (3, True)


def test_workers_and_the_leases_of_their_services_are_shown(client: Client, browser: Browser) -> None:
    announce(client, "flights", "flight:1")
    with Balancer(client.url, "flights", consumer="c1", policy=BalancerPolicy(lease_ms=60_000)):

        def shown() -> bool:
            return "flight:1 c1" in browser.get("/workers?service=flights").text

        eventually(shown, "the lease")
    assert browser.get("/workers?service=nope").status == 404


def test_a_cluster_is_shown_and_acted_on_as_one_server_is(request: pytest.FixtureRequest) -> None:
    deployed = lent_cluster(request)
    with Client(deployed.url) as client, authorized(deployed.url, Level.ADMIN) as browser:
        fill_with(client, "x")
        for n in range(30):
            client.execute("XADD", f"device:{n}", "*", "n", n)
        seen = pages_reached(browser)
        assert [path for path, page in seen.items() if page.status != 200] == []
        assert "31 found" in seen["/streams"].text
        key = next(path for path in seen if path.startswith("/key?") and "parked" in path)
        assert "The key goes on." in browser.send(browser.get(key), "/key/unpark").text
        assert "key unpark" in browser.get("/audit").text


def test_damaged_bookkeeping_is_a_sentence_and_the_rest_of_the_page_stays(client: Client, browser: Browser) -> None:
    fill_with(client, "x")
    keys = HandlerKeys("shop", "pay", "orders")
    hint = "millstream doctor names them"
    for key in (
        keys.meta,
        keys.owners,
        keys.leases,
        keys.ready,
        keys.backoff,
        keys.parked,
        keys.awaiting,
        keys.crashes,
    ):
        with replaced(client, key):
            page = browser.get("/handler?name=shop.pay")
            assert page.status == 200, key
            assert f" {key}: the key holds another type of value than needed" in page.text
            assert hint in page.text, key
            assert "dead letters" in page.text
    assert hint not in browser.get("/handler?name=shop.pay").text
    with replaced(client, keys.parked):
        page = browser.get("/key?handler=shop.pay&key=parked+x")
    assert (page.status, "see what millstream doctor finds" in page.text) == (503, True)


def test_a_damaged_key_queue_or_number_breaks_no_page_of_its_handler(client: Client, browser: Browser) -> None:
    fill_with(client, "x")
    keys = HandlerKeys("shop", "pay", "orders")
    client.execute("HSET", keys.meta, "owner", "keyed", "look_ahead", b"\xffgarbage")
    page = browser.get("/handler?name=shop.pay")
    assert (page.status, "parked x" in page.text) == (200, True)
    client.execute("LSET", keys.queue(b"kparked x"), 0, b"\xffgarbage")
    page = browser.get("/handler?name=shop.pay")
    assert (page.status, "failing x backing off" in page.text) == (200, True)
    assert "parked x unreadable 3 its data in Redis were not written by millstream: " in page.text
    page = browser.get("/key?handler=shop.pay&key=parked+x")
    assert (page.status, r"\xffgarbage It is gone from the stream." in page.text) == (200, True)


def test_the_page_of_a_handler_asks_nothing_twice_of_its_streams(client: Client, browser: Browser) -> None:
    for n in range(40):
        ReliableStream(client, f"in:{n}", app="app", handler="handle", consumer="w").join()
        client.execute("XADD", f"in:{n}", "*", "n", n)
    browser.get("/handler?name=app.handle")

    def calls() -> dict[str, int]:
        lines = client.execute("INFO", "commandstats").decode().splitlines()
        found = (line.removeprefix("cmdstat_").partition(":calls=") for line in lines if ":calls=" in line)
        return {name: int(rest.partition(",")[0]) for name, _, rest in found}

    before = calls()
    assert "Streams" in browser.get("/handler?name=app.handle").text
    sent = {name: count - before.get(name, 0) for name, count in calls().items()}
    assert sent["xinfo|stream"] == 40
    assert sent["xinfo|groups"] == 2 * 40, "for the figures and for the table"
    assert sent["hmget"] == 2 * 40


def test_names_that_are_not_utf8_are_links_and_forms_that_work(client: Client, browser: Browser) -> None:
    client.execute("XADD", b"in\xff \n<x>", "*", "n", 1)
    page = browser.get(next(one for one in browser.get("/streams").links if "/stream?" in one))
    assert page.status == 200
    assert r"Stream in\xff \n<x>" in page.text


def test_a_handler_whose_name_is_not_utf8_hides_no_other(client: Client, browser: Browser) -> None:
    fill_with(client, "x")
    client.execute("COPY", HandlerKeys("shop", "pay", "orders").meta, b"millstream:{orders}:orders:sh\xff.pay:meta")
    page = browser.get("/")
    assert (page.status, r"sh\xff.pay" in page.text) == (200, True)
    assert "/handler?name=shop.pay" in page.links
    page = browser.get("/workers")
    assert (page.status, r"sh\xff.pay" in page.text) == (200, True)


def test_bytes_that_are_not_utf8_in_an_address_or_a_form_are_no_internal_error(
    client: Client, browser: Browser
) -> None:
    fill_with(client, "x")
    for path in ("/streams?prefix=%ff", "/delayed?stream=%ff", "/redis?x=%ed%a0%80"):
        assert browser.get(path).status == 200, path
    fields = browser.get("/key?handler=shop.pay&key=parked+x").form("/key/unpark")

    def send(**changed: bytes) -> int:
        form = urlencode({**fields, **changed}, doseq=True)
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        return browser.http.post("/key/park", content=form, headers=kind, follow_redirects=True).status_code

    assert send(form_token=b"\xff") == 403
    assert send(key=b"\xff", reason=b"\xfe") == 200
    assert r"key \xff, reason \xfe" in browser.get("/audit").text


def test_one_request_reads_what_many_share_at_the_same_time() -> None:
    shared, reads, started = Shared(), list[int](), threading.Barrier(5)

    def read() -> int:
        reads.append(1)
        return len(reads)

    def ask() -> None:
        started.wait(FAIL_SAFE_S)
        assert shared.get("overview", 1_000.0, read, keep_ms=2_000.0) == 1

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAIL_SAFE_S)
    assert len(reads) == 1
    assert shared.get("overview", 3_000.0, read, keep_ms=2_000.0) == 2
    shared.clear()
    assert shared.get("overview", 3_000.0, read, keep_ms=2_000.0) == 3
    for n in range(200):
        assert shared.get(f"streams {n}", 3_000.0, lambda n=n: n, keep_ms=2_000.0) == n  # type: ignore[misc]


def test_pages_that_wait_for_redis_keep_nothing_else_waiting(client: Client) -> None:
    fill_with(client, "x")
    threads: set[int] = set()
    entered, go_on = threading.Semaphore(0), threading.Event()

    def redact(name: str, text: str) -> str:
        threads.add(threading.get_ident())
        entered.release()
        assert go_on.wait(FAIL_SAFE_S)
        return text

    async def answers() -> tuple[list[int], int]:
        app = console_app(client.url, authorize=lambda request: Level.ADMIN, redact=redact)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http:
            pages = [asyncio.create_task(http.get("/audit")) for _ in range(60)]
            try:
                for _ in range(8):
                    assert await asyncio.to_thread(entered.acquire, timeout=FAIL_SAFE_S)
                alive = await asyncio.wait_for(http.get("/console.css"), FAIL_SAFE_S / 2)
                assert (await asyncio.wait_for(http.get("/healthz"), FAIL_SAFE_S / 2)).text == "ok"
            finally:
                go_on.set()
            return [(await page).status_code for page in pages], alive.status_code

    assert asyncio.run(answers()) == ([200] * 60, 200)
    assert len(threads) <= 8


def test_a_handler_that_is_new_is_found_at_once(client: Client, browser: Browser) -> None:
    assert browser.get("/handler?name=app.handle").status == 404
    ReliableStream(client, "in", app="app", handler="handle", consumer="w").join()
    client.execute("XADD", "in", "*", "n", 1)
    assert browser.get("/handler?name=app.handle").status == 200


def test_a_page_reloads_itself_only_if_that_is_asked_for(browser: Browser) -> None:
    page = browser.get("/redis")
    assert "http-equiv" not in page.html
    assert '<meta http-equiv="refresh" content="5">' in browser.get("/redis?refresh=5").html
    assert "http-equiv" not in browser.get("/redis?refresh=1").html


def test_a_redis_that_is_away_is_one_sentence_and_the_console_goes_on(tmp_path: Path) -> None:
    with EmbeddedServer() as server, console(server.url, tmp_path, "admin") as browser:
        with Client(server.url) as client:
            client.execute("XADD", "x", "*", "n", 1)
        assert "1 found" in browser.get("/streams").text
        server.stop()
        page = browser.get("/streams?prefix=x")
        assert (page.status, "Redis: " in page.text) == (503, True)
        eventually(lambda: "problem" in browser.get("/").text, "the overview to name what it cannot reach")
        server.start()
        eventually(lambda: browser.get("/streams?prefix=y").status == 200, "the page")


def test_the_queries_on_spark_are_shown_with_the_begin_of_their_run_and_their_lag(
    client: Client, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.spark.run.liveness._TTL_MS", 3_600_000)  # the test repeats no announcement
    assert "Nothing has run on Spark yet" in browser.get("/queries").text
    fill(client, 3)
    ReliableStream(client, "in", app="app", handler="handle", consumer="w").join()
    CommitStore(client, app="shop", handler="bill", token=1).begin_run(["in"])
    client.execute("HSET", HandlerKeys("shop", "bill", "in").meta, "committed_id", "0-1")
    for stage in ("minutes", "hours", "days"):
        client.execute("XGROUP", "CREATE", "in", stage_group("shop", stage), "0", "ENTRIESREAD", 0)
    announce_run(client, "shop", ["minutes"], epoch=1_700_000_000_000_000)
    client.execute("SET", worker_name_key("shop", run_name("hours")), "of another program")
    client.execute("LPUSH", worker_name_key("shop", run_name("days")), "of another program")
    page = eventually(lambda: "shop.bill" in (one := browser.get("/queries")).text and one, "a new overview")
    assert page
    assert "shop.bill not running spark - - 1 3 " in page.text
    assert "shop.minutes running spark, stage 2023-11-14T22:13:20.000" in page.text
    for stage in ("hours", "days"):
        assert f"shop.{stage} running spark, stage - - 1 3 " in page.text
    assert "/handler?name=shop.bill" in page.links
    assert "app.handle" not in page.text


def test_the_last_micro_batch_of_a_query_is_shown_and_its_error_at_the_level_of_payloads(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.delivery.query_progress.HELD_MS", 3_600_000)  # the test repeats no report
    for stage in ("minutes", "hours", "days", "weeks"):
        client.execute("XADD", "in", "*", "n", 1)
        client.execute("XGROUP", "CREATE", "in", stage_group("shop", stage), "0", "ENTRIESREAD", 0)
    batch = QueryProgress(batch=1_234, rows=50_000, rows_per_s=9_876.5, took_ms=5_000, began_ms=1_700_000_000_000)
    failed = QueryProgress(failures=3, last_failure="ValueError: secret 7", ui="javascript:alert(1)")
    ui = "http://127.0.0.1:4040"
    report_progress(client, "shop", {"minutes": msgspec.structs.replace(batch, ui=ui), "hours": failed})
    client.execute("SET", query_progress_key("shop", "days"), b"\xc1 of another program")
    client.execute("LPUSH", query_progress_key("shop", "weeks"), "of another program")
    for level, error in ((Level.PAYLOADS, "ValueError: secret 7"), (Level.FIGURES, "failed")):
        with authorized(client.url, level) as viewer:
            page = viewer.get("/queries")
        assert f"shop.minutes 1,234 2023-11-14T22:13:20.000Z 5.0 s 50,000 9,876 0 - {ui}" in page.text
        assert f"shop.hours - - - - - 3 {error} -" in page.text
        assert [link for link in page.links if "4040" in link or "script" in link] == [ui]
        assert page.text.count("shop.days") == page.text.count("shop.weeks") == 1


def test_a_stage_that_makes_no_progress_is_in_the_attention_list(client: Client, browser: Browser) -> None:
    client.execute("XADD", "in", f"{server_time_ms(client) - 3_600_000}-0", "n", 1)
    client.execute("XGROUP", "CREATE", "in", stage_group("shop", "minutes"), "0", "ENTRIESREAD", 0)
    page = browser.get("/")
    assert "warning stage shop.minutes: 1 entry waits, the oldest for " in page.text
    assert page.html.count('<a href="/queries">Show</a>') == 1
