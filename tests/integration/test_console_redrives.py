"""Redrives at a rate in the console: in order, shown and stopped on every console, and ended in any way without a loss."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from millstream import Message
from millstream.admin.audit_log import AuditLog, AuditRecord
from millstream.delivery import redrive_reports
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue, DeadLetterRef, Redriven
from millstream.delivery.redrive_reports import HELD_MS, RedriveReport, read_redrives, report_redrive, request_stop
from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys, audit_key, redrive_reports_key
from millstream.redis_client.pipelining import server_time_ms
from millstream.services.console import Level, redrive_threads
from tests.support import workers
from tests.support.commandline import call
from tests.support.console_threads import ConsoleThread
from tests.support.consoles import Browser, Page, authorized, fill_with, write_tokens
from tests.support.dead_letters import KEYS, add_dead_letter, entries, left
from tests.support.service_process import ServiceProcess, http_client
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli]

REDRIVE, STOP = "/letters/redrive", "/letters/redrive/stop"
HOUR_MS = 3_600_000
THREAD = "millstream-redrive"
BOTH = "return redis.call('XLEN', KEYS[1]) + redis.call('XLEN', KEYS[2])"


@contextmanager
def console(client: Client, folder: Path, level: str = "operate") -> Iterator[Browser]:
    """A console in a thread, whose end is that of a process."""
    with ConsoleThread(client.url, write_tokens(folder)) as started, http_client(started.url) as http:
        browser = Browser(http)
        browser.log_in(level)
        yield browser


@contextmanager
def console_process(client: Client, folder: Path) -> Iterator[tuple[ServiceProcess, Browser]]:
    """A console as a process, with a log."""
    command = ("console", "--token-file", str(write_tokens(folder)))
    with (
        ServiceProcess(command, (), client.url, log=folder / "log") as started,
        http_client(started.url) as http,
    ):
        browser = Browser(http)
        browser.log_in("operate")
        yield started, browser


def add(client: Client, count: int, keys: HandlerKeys = KEYS) -> None:
    """Dead letters of a known handler, with the numbers from 1 to `count`."""
    client.execute("HSETNX", keys.meta, "owner", "workers")
    for number in range(1, count + 1):
        add_dead_letter(client, [b"n", b"%d" % number], keys=keys, entry_id=f"{number}-0")


def begin(browser: Browser, rate: str, name: str = "shop.pay") -> Page:
    """Redrive all dead letters of a handler at a rate; answer again where another redrive has changed them meanwhile."""
    page = browser.send(browser.get(f"/letters?handler={name}"), REDRIVE)
    while page.status == 200 and "Yes, do it" in page.text:
        page = browser.send(page, REDRIVE, rate=rate)
    return page


def redriven(client: Client) -> list[int]:
    """The numbers of the letters that are in the stream again."""
    return [int(pairs[3]) for pairs in entries(client)]


def has_redriven(client: Client, count: int) -> bool:
    return bool(client.execute("XLEN", "orders") >= count)


def redriving() -> bool:
    """Whether a thread of this process redrives at a rate, or has its result to record."""
    return any(one.name == THREAD for one in threading.enumerate())


def reported_after(client: Client, time_ms: int) -> bool:
    """Whether the only redrive was reported after this time."""
    reports = client.execute("ZRANGE", redrive_reports_key("shop", "pay"), 0, -1, "WITHSCORES")
    return bool(reports) and float(reports[-1]) > time_ms + HELD_MS


def assert_all_counted(result: str, total: int) -> None:
    """Each letter counts as redriven, or as one whose step lost its reply."""
    numbers = re.fullmatch(r"(\d+) of (\d+) redriven(?:, (\d+) may have been)?", result)
    assert numbers, result
    assert (int(numbers[1]) + int(numbers[3] or 0), int(numbers[2])) == (total, total)


def ended(client: Client) -> AuditRecord:
    """The record of the only redrive, once it has ended."""

    def found() -> AuditRecord | None:
        (record,) = (one for one in AuditLog(client).read() if one.action == "dlq redrive")
        return record if record.result is not None else None

    return eventually(found, "the end of the redrive")  # type: ignore[return-value]


# --- At a rate ---


def test_a_redrive_at_a_rate_ends_in_the_order_of_the_letters_while_a_worker_processes_them(
    client: Client, tmp_path: Path
) -> None:
    def handle(message: Message) -> dict[str, str]:
        return {"n": str(message.text("n"))}

    client.execute("XGROUP", "CREATE", "in", "first", "$", "MKSTREAM")
    with workers.working(client, workers.make(handle, concurrency=1)), console(client, tmp_path) as browser:
        eventually(lambda: client.execute("EXISTS", workers.KEYS.meta), "the worker to join")
        add(client, 60, workers.KEYS)
        page = begin(browser, "100", "app.handle")
        assert (page.status, "The redrive has begun." in page.text) == (200, True)
        workers.fill(client, 20, first=1_000)
        record = ended(client)
        eventually(lambda: len(workers.outputs(client)) == 80, "all outputs")
    processed = workers.outputs(client)
    assert [one for one in processed if one < 1_000] == list(range(1, 61))
    assert [one for one in processed if one >= 1_000] == list(range(1_000, 1_020))
    assert record.about == {"handler": "app.handle", "letters": "60", "rate": "100/s"}
    assert record.result == "60 of 60 redriven"
    assert client.execute("XLEN", workers.KEYS.dead_letters) == 0


def test_a_redrive_at_a_rate_is_recorded_as_that_of_the_command(client: Client, tmp_path: Path) -> None:
    add(client, 3)
    with console(client, tmp_path) as browser:
        begin(browser, "3000/m")
        by_form = ended(client)
    assert by_form.by.startswith("token ")
    client.execute("FLUSHALL")
    add(client, 3)
    assert call("dlq", "redrive", "shop.pay", "--rate", "3000/m", "--yes", url=client.url).code == 0
    by_command = ended(client)
    assert (by_form.action, by_form.about, by_form.result) == (by_command.action, by_command.about, by_command.result)
    assert redriven(client) == [1, 2, 3]


def test_a_rate_spreads_the_letters_and_the_request_waits_for_none(client: Client, tmp_path: Path) -> None:
    add(client, 3)
    with console(client, tmp_path) as browser:
        begin(browser, "5/d")  # the next one is due in hours
        eventually(lambda: redriven(client) == [1], "the first letter")
        (found,) = read_redrives(client, "shop", "pay")
        assert (found.letters, round(found.rate * 86_400)) == (3, 5)
    assert (redriven(client), left(client)) == ([1], 2)


@pytest.mark.parametrize("rate", ["0", "60/y", "-1", "fast", "1e999"])
def test_a_wrong_rate_redrives_nothing_and_the_form_comes_again_with_it(
    client: Client, tmp_path: Path, rate: str
) -> None:
    add(client, 2)
    with console(client, tmp_path) as browser:
        page = begin(browser, rate)
        assert (page.status, f"'{rate}': rate must be" in page.text, "60/m" in page.text) == (400, True, True)
        assert (left(client), AuditLog(client).read(), list(read_redrives(client, "shop", "pay"))) == (2, [], [])
        assert page.form(REDRIVE)["rate"] == [rate]
        assert "The redrive has begun." in browser.send(page, REDRIVE, rate="5/d").text


def test_the_question_that_comes_again_has_the_command_with_the_rate_that_was_filled_in(
    client: Client, tmp_path: Path
) -> None:
    add(client, 2)
    letter_id = DeadLetterQueue(client).select(DeadLetterFilter())[0].letter_id
    with console(client, tmp_path) as browser:
        question = browser.send(browser.get("/letters?handler=shop.pay"), REDRIVE)
        assert "The command: millstream dlq redrive shop.pay" in question.text
        assert "--rate" not in question.text
        add(client, 1)
        again = browser.send(question, REDRIVE, rate=" 60/m ")
        assert "The command: millstream dlq redrive shop.pay --rate 60/m " in again.text
        one = browser.send(again, REDRIVE, confirm="0", only="1", letter=f"{letter_id} orders")
    assert f"The command: millstream dlq redrive shop.pay {letter_id} --stream orders --rate 60/m " in one.text


@pytest.mark.parametrize("level", ["figures", "payloads"])
def test_a_viewer_without_the_level_neither_begins_nor_stops_a_redrive_at_a_rate(
    client: Client, tmp_path: Path, level: str
) -> None:
    add(client, 2)
    with console(client, tmp_path) as operator, console(client, tmp_path, level) as browser:
        question = operator.send(operator.get("/letters?handler=shop.pay"), REDRIVE).form(REDRIVE)
        own = browser.get("/").form("/logout")["form_token"]
        assert browser.post(REDRIVE, **{**question, "form_token": own, "rate": "60/m"}).status == 403
        assert (left(client), AuditLog(client).read()) == (2, [])
        stop = begin(operator, "5/d").form(STOP)
        assert browser.post(STOP, **{**stop, "form_token": own}).status == 403
        assert STOP not in browser.get("/letters?handler=shop.pay").actions
        assert [one.action for one in AuditLog(client).read()] == ["dlq redrive"]


def test_more_redrives_than_one_console_may_do_are_refused_and_redrive_nothing(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive_threads, "MOST_REDRIVES", 2)
    add(client, 10)
    with console(client, tmp_path) as browser, console(client, tmp_path) as another:
        assert begin(browser, "5/d").status == 200
        assert begin(browser, "5/d").status == 200
        page = begin(browser, "5/d")
        assert (page.status, "nothing was redriven; wait until one has ended, or stop one" in page.text) == (409, True)
        assert len(AuditLog(client).read()) == 2
        assert begin(another, "5/d").status == 200
        stop = browser.get("/letters?handler=shop.pay")
        browser.send(stop, STOP)
        assert eventually(lambda: (one := begin(browser, "5/d")).status == 200 and one, "a free place")


def test_the_letters_that_cannot_be_redriven_stay_and_the_record_counts_them(client: Client, tmp_path: Path) -> None:
    add(client, 1)
    wide = [one for n in range(4_000) for one in (b"f%d" % n, b"")]
    letter_id = add_dead_letter(client, wide)
    add(client, 1)
    with console(client, tmp_path) as browser:
        begin(browser, "1000")
        result = str(ended(client).result)
    assert result.startswith(f"2 of 3 redriven; 1 dead letter could not be, such as {letter_id}: its 4,000 fields")
    assert left(client) == 1


# --- Progress, and the stop ---


def test_every_console_shows_how_far_a_redrive_is_and_stops_it(client: Client, tmp_path: Path) -> None:
    add(client, 1_000)
    with console(client, tmp_path) as browser, console(client, tmp_path) as another:
        begin(browser, "600/m")

        def shown() -> Page | None:
            page = another.get("/letters?handler=shop.pay")
            return page if re.search(r"[1-9]\d* of 1,000", page.text) else None

        page = eventually(shown, "the progress on the other console")
        assert page is not None
        (found,) = read_redrives(client, "shop", "pay")
        record = AuditLog(client).read()[0]
        assert (found.id, found.by, found.began_ms) == (record.id, record.by, record.at_ms)
        assert found.by in page.text
        assert "10/s" in page.text
        page = another.send(page, STOP)
        assert "The stop is requested" in page.text
        assert (STOP in page.actions, "requested" in page.text) == (False, True)
        moved = int(str(ended(client).result).partition(" ")[0])
        eventually(lambda: "Redrives at a rate" not in browser.get("/letters?handler=shop.pay").text, "its end")
    assert redriven(client) == list(range(1, moved + 1))
    assert left(client) == 1_000 - moved > 0
    rest = f"stopped by an operator, {1_000 - moved} dead letters are left"
    assert ended(client).result == f"{moved} of 1,000 redriven; {rest}"
    stop = next(one for one in AuditLog(client).read() if one.action == "dlq stop")
    assert (stop.about, stop.result) == ({"handler": "shop.pay", "redrive": found.id}, "requested")


def test_a_redrive_is_shown_with_its_numbers_its_rate_its_begin_its_operator_and_the_time_that_is_left(
    client: Client,
) -> None:
    fill_with(client, "x")
    with authorized(client.url, Level.OPERATE) as browser:
        text = browser.get("/letters?handler=shop.pay").text
    assert "2023-11-14T22:13:20.000Z ann 2 of 11, 2 may have been, 1 could not be 30/m 12.0 s Stop" in text
    assert "millstream dlq stop shop.pay" in text


def test_the_command_stops_one_redrive_or_all_of_a_handler(client: Client, tmp_path: Path) -> None:
    add(client, 3)
    with console(client, tmp_path) as browser:
        begin(browser, "5/d")
        begin(browser, "5/d")
        first, second = read_redrives(client, "shop", "pay")
        done = call("dlq", "stop", "shop.pay", first.id, "--json", url=client.url)
        assert done.json() == {"handler": "shop.pay", "redrives": [first.id]}
        eventually(lambda: [one.id for one in read_redrives(client, "shop", "pay")] == [second.id], "its end")
        gone = call("dlq", "stop", "shop.pay", first.id, url=client.url)
        assert (gone.code, f"there is no redrive {first.id} of shop.pay under way" in gone.err) == (1, True)
        done = call("dlq", "stop", "shop.pay", url=client.url)
        assert done.out.startswith(f"redrive {second.id} by {second.by} at 5/d stops within some seconds: ")
        eventually(lambda: not read_redrives(client, "shop", "pay"), "its end")
    none = call("dlq", "stop", "shop.pay", url=client.url)
    assert (none.code, none.out) == (0, "no console redrives dead letters of shop.pay at a rate\n")


def test_a_stop_of_a_redrive_that_has_ended_is_one_sentence(client: Client, tmp_path: Path) -> None:
    add(client, 2)
    with console(client, tmp_path) as browser:
        form = begin(browser, "5/d").form(STOP)
        browser.post(STOP, **form)
        ended(client)
        page = eventually(lambda: (one := browser.post(STOP, **form)).status == 404 and one, "its end")
    assert page
    assert "this redrive has ended: see the dead letters and the audit" in page.text


def test_a_report_is_kept_for_seconds_and_the_later_one_counts(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    found = RedriveReport(id="1-0", by="ann", rate=2.0, began_ms=1, letters=10)
    report_redrive(client, "shop", "pay", found)
    assert client.execute("PTTL", redrive_reports_key("shop", "pay")) in {*range(HELD_MS + 1), -2}, "it ends by itself"
    monkeypatch.setattr(redrive_reports, "HELD_MS", HOUR_MS)  # no other ends within the test
    report_redrive(client, "shop", "pay", found)
    later = RedriveReport(id="1-0", by="ann", rate=2.0, began_ms=1, letters=10, tried=4, redriven=3)
    eventually(lambda: client.execute("PTTL", redrive_reports_key("shop", "pay")) < HOUR_MS, "a later time")
    report_redrive(client, "shop", "pay", later)  # the earlier one was not removed: Redis was away
    assert list(read_redrives(client, "shop", "pay")) == [later]
    assert (later.left, later.left_ms) == (6, 3_000)
    report_redrive(client, "shop", "pay", later, earlier=later)
    assert list(read_redrives(client, "shop", "pay")) == [later]
    report_redrive(client, "shop", "pay", None, earlier=later)
    request_stop(client, "shop", [later])
    client.execute("SET", redrive_reports_key("shop", "pay"), "of another program")
    assert list(read_redrives(client, "shop", "pay")) == []


# --- Ends ---


def test_a_console_in_an_application_ends_its_redrives_at_the_exit_of_the_interpreter_and_waits_for_redis(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    url = millstream_fresh_server.url
    program = f"""
from millstream.services.console import Level, console_app, redrive_threads
from tests.support.consoles import Browser, client_of
redrive_threads.STOP_S = {FAIL_SAFE_S}
app = console_app({url!r}, authorize=lambda request: Level.OPERATE)
browser = Browser(client_of(app))
question = browser.send(browser.get("/letters?handler=shop.pay"), {REDRIVE!r})
browser.send(question, {REDRIVE!r}, rate="5/d")
input()
"""
    with Client(url) as client:
        add(client, 3)
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
        try:
            eventually(partial(has_redriven, client, 1), "the first letter")
            millstream_fresh_server.pause()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(b"\n", timeout=1)  # an exit that does not wait for Redis needs less
        finally:
            millstream_fresh_server.resume()
            assert process.wait(FAIL_SAFE_S) == 0
        (record,) = AuditLog(client).read()
        assert record.result == "1 of 3 redriven; its console stopped, 2 dead letters are left"
        assert left(client) == 2


def test_a_console_that_stops_ends_its_redrives_and_records_how_many_letters_they_came_to(
    client: Client, tmp_path: Path
) -> None:
    add(client, 1_000)
    with console_process(client, tmp_path) as (process, browser):
        begin(browser, "5/d")
        eventually(partial(has_redriven, client, 1), "the first letter")
        begin(browser, "10")
        eventually(partial(has_redriven, client, 5), "some letters")
        assert process.stop() == 0
        said = process.said()
    moved = len(redriven(client))
    assert moved == 1_000 - left(client)
    later, earlier = (str(one.result) for one in AuditLog(client).read())
    assert earlier == "1 of 1,000 redriven; its console stopped, 999 dead letters are left"
    assert later == f"{moved - 1} of 999 redriven; its console stopped, {1_000 - moved} dead letters are left"
    assert f"redrive of shop.pay at 10/s ended early: {later}" in said
    assert list(read_redrives(client, "shop", "pay")) == []


def test_a_console_that_is_killed_leaves_each_letter_redriven_or_dead_and_a_record_without_a_result(
    client: Client, tmp_path: Path
) -> None:
    add(client, 1_000)
    for count in (40, 120):
        with console_process(client, tmp_path) as (process, browser):
            begin(browser, "50")
            eventually(partial(has_redriven, client, count), "some letters")
            process.process.kill()
            process.process.wait()
        assert client.execute("EVAL", BOTH, 2, "orders", KEYS.dead_letters) == 1_000
    assert [one.result for one in AuditLog(client).read()] == [None, None]
    assert call("dlq", "redrive", "--all", "--yes", url=client.url).code == 0
    assert sorted(redriven(client)) == list(range(1, 1_001))


def test_a_redrive_whose_connections_are_killed_goes_on_and_counts_each_letter_once(
    client: Client, tmp_path: Path
) -> None:
    add(client, 200)
    with console(client, tmp_path) as browser:
        begin(browser, "50")
        for count in (10, 40, 80, 120):
            eventually(partial(has_redriven, client, count), "some letters")
            client.execute("CLIENT", "KILL", "TYPE", "normal")
        assert_all_counted(str(ended(client).result), 200)
    assert (redriven(client), left(client)) == (list(range(1, 201)), 0)


def test_a_redrive_is_reported_and_stopped_again_once_its_connection_was_killed(client: Client, tmp_path: Path) -> None:
    add(client, 3)
    with console(client, tmp_path) as browser:
        begin(browser, "5/d")
        eventually(lambda: redriven(client) == [1], "the first letter")
        client.execute("CLIENT", "KILL", "TYPE", "normal")
        killed_ms = server_time_ms(client)
        eventually(lambda: reported_after(client, killed_ms) or AuditLog(client).read()[0].result, "a later report")
        request_stop(client, "shop", read_redrives(client, "shop", "pay"))
        assert ended(client).result == "1 of 3 redriven; stopped by an operator, 2 dead letters are left"


def test_a_redrive_outlives_a_restart_of_redis(millstream_fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    with Client(millstream_fresh_server.url) as client:
        add(client, 100)
        with console(client, tmp_path) as browser:
            begin(browser, "50")
            eventually(partial(has_redriven, client, 10), "some letters")
            millstream_fresh_server.restart()
            client.close()
            assert_all_counted(str(ended(client).result), 100)
        assert (redriven(client), left(client)) == (list(range(1, 101)), 0)


def test_letters_of_a_step_whose_reply_was_lost_are_counted_as_such(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(client, 20)
    inner, lost = DeadLetterQueue.redrive, list[bool]()

    def lose_replies(queue: DeadLetterQueue, refs: Sequence[DeadLetterRef]) -> Iterator[Redriven]:
        if not lost:  # of the five letters of the first step, it redrives two
            lost.append(True)
            list(inner(queue, refs[:2]))
            raise Unavailable("the connection broke", unreachable=True)
        yield from inner(queue, refs)

    monkeypatch.setattr(DeadLetterQueue, "redrive", lose_replies)
    with console(client, tmp_path) as browser:
        begin(browser, "50")
        assert ended(client).result == "18 of 20 redriven, 2 may have been"
    assert (redriven(client), left(client)) == (list(range(1, 21)), 0)


def test_a_redrive_waits_while_redis_is_full_and_its_result_too_but_holds_no_place(
    millstream_fresh_server: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(redrive_threads, "MOST_REDRIVES", 1)
    inner, steps, is_full = DeadLetterQueue.redrive, list[int](), threading.Event()

    def wait_until_full(queue: DeadLetterQueue, refs: Sequence[DeadLetterRef]) -> Iterator[Redriven]:
        if steps:  # the first step has room
            assert is_full.wait(FAIL_SAFE_S)
        steps.append(len(refs))
        yield from inner(queue, refs)

    monkeypatch.setattr(DeadLetterQueue, "redrive", wait_until_full)
    with Client(millstream_fresh_server.url) as client:
        add(client, 40)
        queue = DeadLetterQueue(client)
        refs = queue.select(DeadLetterFilter(app="shop"))
        with console(client, tmp_path) as browser:
            begin(browser, "20")
            add(client, 3)  # not among those that it redrives
            eventually(partial(has_redriven, client, 1), "some letters")
            client.execute("CONFIG", "SET", "maxmemory", "1")
            is_full.set()
            eventually(lambda: "redrive of shop.pay waits: " in caplog.text, "a refused step")
            moved = len(redriven(client))
            assert queue.purge(refs) == 40 - moved
            eventually(lambda: not read_redrives(client, "shop", "pay"), "the end of the redrive")
            refused = begin(browser, "5/d")
            assert (refused.status, "maxmemory" in refused.text) == (503, True)
            assert AuditLog(client).read()[0].result is None
            client.execute("CONFIG", "SET", "maxmemory", "0")
            result = str(ended(client).result)
        assert result.startswith(f"{moved} of 40 redriven; {40 - moved} dead letters could not be, such as ")
        assert (redriven(client), left(client)) == (list(range(1, moved + 1)), 3)


def test_a_redrive_that_redis_refuses_is_recorded_with_its_number(client: Client, tmp_path: Path) -> None:
    add(client, 500)
    with console(client, tmp_path) as browser:
        begin(browser, "20")
        eventually(partial(has_redriven, client, 5), "some letters")
        client.execute("SET", redrive_reports_key("shop", "pay"), "of another program")
        result = str(ended(client).result)
    moved = len(redriven(client))
    assert result.startswith("failed: ")
    assert result.endswith(f"; {moved} of 500 redriven before")
    assert (redriven(client), left(client)) == (list(range(1, moved + 1)), 500 - moved)


def test_a_result_that_redis_never_takes_ends_with_a_line_in_the_log(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(client, 3)
    with console(client, tmp_path) as browser:
        begin(browser, "5/d")
        found = read_redrives(client, "shop", "pay")
        client.execute("SET", audit_key(), "of another program")
        request_stop(client, "shop", found)
        eventually(lambda: not redriving(), "the end of its thread")
    (line,) = (one.getMessage() for one in caplog.records if "not recorded" in one.getMessage())
    assert line.endswith("; its record stays without one")


def test_a_mistake_of_the_code_ends_a_redrive_with_a_result_and_a_traceback_in_the_log(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(client, 3)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(DeadLetterQueue, "redrive", fail)
    with console(client, tmp_path) as browser:
        begin(browser, "5/d")
        assert ended(client).result == "failed: internal error; 0 of 3 redriven before"
        assert list(read_redrives(client, "shop", "pay")) == []
    assert "ZeroDivisionError: of a test" in caplog.text


def test_a_redrive_whose_thread_cannot_start_leaves_a_result_and_no_report(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(client, 3)
    inner = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == THREAD:
            raise RuntimeError("can't start new thread")
        inner(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    refs = DeadLetterQueue(client).select(DeadLetterFilter(app="shop"))
    threads = redrive_threads.RedriveThreads(client.url)
    with pytest.raises(RuntimeError):
        threads.start(client, refs, rate=1, by="ann", about={})
    assert list(read_redrives(client, "shop", "pay")) == []
    assert ended(client).result == "failed: can't start new thread; 0 of 3 redriven before"


def test_a_console_ends_while_redis_hangs_and_its_log_names_the_redrive_that_has_not_ended(
    millstream_fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    with Client(millstream_fresh_server.url) as client:
        add(client, 3)
        with console_process(client, tmp_path) as (process, browser):
            begin(browser, "5/d")
            eventually(partial(has_redriven, client, 1), "the first letter")
            millstream_fresh_server.pause()
            try:
                assert process.stop() == 0
            finally:
                millstream_fresh_server.resume()
            assert process.said().count("redrive of shop.pay not ended: Redis does not answer") == 1
        assert (redriven(client), left(client)) == ([1], 2)
