"""The attention list of the console: each check as a sentence with its start, its page and its command."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from html import unescape
from importlib import import_module
from pathlib import Path

import pytest

from millstream.admin import inspection
from millstream.admin.attention import LISTED, read_overview, sentence_of
from millstream.admin.figure_history import STEP_MS, FigureHistory, HandlerSample, Sample
from millstream.admin.liveness import find_workers
from millstream.delivery.commit_store import FORMAT, CommitStore
from millstream.delivery.effects import SINCE_SUFFIX
from millstream.delivery.keyed_stream import LeaseRelease
from millstream.delivery.last_error import LastError
from millstream.delivery.long_runs import LongRun, report_long_runs
from millstream.delivery.pause import Pause
from millstream.delivery.query_progress import QueryProgress, report_progress
from millstream.delivery.reliable_stream import NACK_IDLE_MS, ReliableStream
from millstream.delivery.restarts import KEPT_MS, Restart, record_restart
from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import (
    HandlerKeys,
    StreamKeys,
    restarts_key,
    run_name,
    stage_group,
    worker_name_key,
)
from millstream.redis_client.pipelining import server_time_ms
from millstream.redis_client.replies import fields_of_info
from millstream.services.console import Level
from tests.support.commandline import call
from tests.support.consoles import authorized
from tests.support.keyed_fixtures import joined_by_field
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]

PAGE = Path(__file__).parents[2] / "docs/console.md"
HOUR_MS = 3_600_000
SECRET = "ValueError: card 4111"
WITHOUT_START = {"unreadable", "format", "leftovers", "reachable", "access", "role", "cluster", "data"}
"""Checks whose findings never have a start: nothing records it."""
OF_REDIS = {"eviction", "persistence", "memory", "disk", "reachable"}
"""Checks of Redis itself, which need a server of their own."""
TRIED_ELSEWHERE = {"access", "role", "cluster", "data"}
"""Checks that need another user or other servers: `test_doctor.py` has them."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """An item of the list, as a page shows it."""

    check: str
    severity: str
    sentence: str
    since_ms: int | None
    link: str
    commands: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the list has to show of a check.

    * `sentence`: an expression for the whole of it; `command`: the beginning of the first command, "" for none
    * `since_ms`: its start; None: none. If it is `measured`, the time that has passed since the scenario began may add
    """

    check: str
    severity: str
    sentence: str
    since_ms: int | None
    measured: bool = False
    link: str
    command: str


def items(html: str) -> list[Item]:
    """The items of an overview."""
    found = re.findall(r'<li class="(\w+)" data-key="([\w-]+) [^"]*">(.*?)</li>', html, re.DOTALL)
    return [_item(severity, check, body) for severity, check, body in found]


def _item(severity: str, check: str, body: str) -> Item:
    sentence = re.search(r"</strong>(.*?)(?:<span|<a|</p>)", body, re.DOTALL)
    since = re.search(r"Since <time>([^<]+)</time>", body)
    link = re.search(r'<a href="([^"]+)">Show</a>', body)
    assert sentence
    return Item(
        check=check,
        severity=severity,
        sentence=" ".join(unescape(sentence[1]).split()),
        since_ms=round(datetime.fromisoformat(since[1]).timestamp() * 1000) if since else None,
        link=unescape(link[1]) if link else "",
        commands=[unescape(one) for one in re.findall(r"<code>(.*?)</code>", body)],
    )


def overview(url: str, level: Level = Level.PAYLOADS, **options: object) -> list[Item]:
    """The items that a viewer of this level sees."""
    with authorized(url, level, **options) as browser:
        return items(browser.get("/").html)


def wrong_items(shown: Sequence[Item], expected: Sequence[Expected], passed_ms: int) -> Iterator[str]:
    """What differs from the table, and each item without what every item has."""
    for row in expected:
        some = [one for one in shown if one.check == row.check and re.fullmatch(row.sentence, one.sentence)]
        if len(some) != 1:
            yield f"{len(some)} of {row}, among {[one.sentence for one in shown if one.check == row.check]}"
            continue
        (one,) = some
        late_ms = None if row.since_ms is None or one.since_ms is None else one.since_ms - row.since_ms
        is_right = one.since_ms is row.since_ms is None if late_ms is None else 0 <= late_ms <= row.measured * passed_ms
        if not is_right:
            yield f"{row.check}: since {one.since_ms}, not {row.since_ms}"
        command = one.commands[0] if one.commands else ""
        if (one.severity, one.link) != (row.severity, row.link) or not command.startswith(row.command):
            yield f"{row.check}: {one}"
    for one in shown:
        if not one.link or (one.since_ms is None and one.check in LISTED - WITHOUT_START - {"memory"}):
            yield f"without a page or a start: {one}"


def of_handler(name: str) -> str:
    return f"/handler?name=shop.{name}"


# --- The scenarios: each makes its checks fire ---


def unreadable_data(client: Client) -> Iterator[Expected]:
    """Keys that no handler of this version has written, and a handler whose stream is gone."""
    keys = HandlerKeys("shop", "broken", "s:broken")
    client.execute("XADD", keys.stream, "*", "n", 1)
    Group(client, keys.stream, keys.group).create()
    client.execute("SET", keys.meta, "x")
    newer = HandlerKeys("shop", "newer", "s:newer")
    client.execute("XADD", newer.stream, "*", "n", 1)
    client.execute("HSET", newer.meta, "format", FORMAT + 1)
    client.execute("HSET", HandlerKeys("shop", "left", "s:gone").meta, "committed_id", "0-0")
    yield Expected(
        check="unreadable",
        severity="problem",
        sentence=r"shop\.broken: its keys on s:broken are unreadable: .*; the handler cannot commit\.",
        since_ms=None,
        link=of_handler("broken"),
        command="redis-cli ",
    )
    yield Expected(
        check="format",
        severity="problem",
        sentence=r"shop\.newer on s:newer: .*: workers and runs of this version refuse to start; .*",
        since_ms=None,
        link=of_handler("newer"),
        command="millstream --version",
    )
    yield Expected(
        check="leftovers",
        severity="warning",
        sentence=r"shop\.left: its streams are gone: s:gone: its progress and state stay in Redis\.",
        since_ms=None,
        link=of_handler("left"),
        command="millstream forget shop.left --dry-run",
    )


def consumers(client: Client, now_ms: int) -> Iterator[Expected]:
    """Consumers that are gone, with and without pending entries, and one that is alive and does not renew its own."""
    for name in ("held", "slow"):
        client.pipeline([("XADD", f"s:{name}", "*", "n", n) for n in range(3)])
        stream = ReliableStream(client, f"s:{name}", app="shop", handler=name, consumer=f"{name}-0")
        stream.join()
        fetched = [one.id for one in stream.fetch(count=2)]
    Group(client, "s:held", HandlerKeys("shop", "held", "s:held").group).create_consumer("empty")
    client.execute("SET", worker_name_key("shop", "slow-0"), "its supervisor")
    group = HandlerKeys("shop", "slow", "s:slow").group
    for entry, idle_ms in zip(fetched, (2 * HOUR_MS, NACK_IDLE_MS + HOUR_MS), strict=True):
        client.execute("XCLAIM", "s:slow", group, "slow-0", 0, entry, "IDLE", idle_ms, "JUSTID")
    yield Expected(
        check="dead-consumers",
        severity="problem",
        sentence=r"shop\.held: 2 pending entries of held-0, idle for .*, on s:held: these messages wait .*",
        since_ms=now_ms,
        measured=True,
        link=of_handler("held"),
        command="millstream worker FILE.py",
    )
    yield Expected(
        check="dead-consumers",
        severity="warning",
        sentence=r"shop\.held: 1 consumer of an ended worker \(empty\), with nothing pending: .*",
        since_ms=now_ms,
        measured=True,
        link=of_handler("held"),
        command="millstream group clean s:held ",
    )
    yield Expected(
        check="idle-entries",
        severity="warning",
        sentence=r"shop\.slow: 2 entries or more pending and idle for .*, on s:slow: .*",
        since_ms=now_ms - 2 * HOUR_MS,
        measured=True,
        link=of_handler("slow"),
        command="millstream group pending s:slow ",
    )


def backlogs(client: Client, now_ms: int) -> Iterator[Expected]:
    """Entries that wait without a worker, and under one that is alive; delayed messages; a lag that rises."""
    began_ms = now_ms - HOUR_MS
    for name in ("waiting", "late", "rising"):
        ReliableStream(client, f"s:{name}", app="shop", handler=name, consumer=f"{name}-0").join()
    for name in ("waiting", "late"):
        client.execute("XADD", f"s:{name}", f"{began_ms}-0", "n", 1)
    for name in ("late", "rising"):
        client.execute("SET", worker_name_key("shop", f"{name}-0"), "its supervisor")
        Group(client, f"s:{name}", HandlerKeys("shop", name, f"s:{name}").group).create_consumer(f"{name}-0")
    client.execute("ZADD", StreamKeys("s:late").due, began_ms, "1-0")
    first_ms = now_ms - 5 * STEP_MS
    for minute in range(5):
        figures = HandlerSample(
            streams=1, added=1, done=1, dead=0, lag=100 * minute, oldest_ms=1, dead_letters=0, stuck=0
        )
        FigureHistory(client).add(Sample(at_ms=first_ms + minute * STEP_MS, handlers={"shop.rising": figures}))
    yield Expected(
        check="waiting",
        severity="problem",
        sentence=r"shop\.waiting: 1 entry waits, the oldest for .*, and no worker or run is alive: nothing .*",
        since_ms=began_ms,
        measured=True,
        link=of_handler("waiting"),
        command="millstream worker FILE.py",
    )
    yield Expected(
        check="late",
        severity="warning",
        sentence=r"shop\.late: 1 entry waits, the oldest for .*, on s:late: its workers do not keep up, .*",
        since_ms=began_ms,
        measured=True,
        link=of_handler("late"),
        command="millstream key list shop.late",
    )
    yield Expected(
        check="overdue",
        severity="problem",
        sentence=r"s:late: delayed messages are overdue, the first for .*: .*",
        since_ms=began_ms,
        link="/delayed",
        command="millstream delayed list s:late",
    )
    yield Expected(
        check="rising",
        severity="warning",
        sentence=r"shop\.rising: its lag has risen from 0 to 400 entries in 4 min: .*",
        since_ms=first_ms,
        link=of_handler("rising"),
        command="millstream info shop",
    )


def on_spark(client: Client, now_ms: int) -> Iterator[Expected]:
    """A stage and a handler whose queries fail, and one that has failed once."""
    began_ms = now_ms - HOUR_MS
    client.execute("XADD", "s:stage", f"{began_ms}-0", "n", 1)
    for stage in ("minutes", "hours"):
        client.execute("XGROUP", "CREATE", "s:stage", stage_group("shop", stage), "0", "ENTRIESREAD", 0)
    client.execute("SET", worker_name_key("shop", run_name("minutes")), 1)
    CommitStore(client, app="shop", handler="bill", token=1).begin_run(["s:stage"])
    reports = {
        "minutes": QueryProgress(failures=3, failing_since_ms=began_ms, last_failure=SECRET),
        "bill": QueryProgress(failures=2, failing_since_ms=began_ms + 1, last_failure=SECRET),
        "hours": QueryProgress(failures=1, failing_since_ms=began_ms, last_failure=SECRET),
    }
    report_progress(client, "shop", reports)
    yield Expected(
        check="stages",
        severity="warning",
        sentence=r"stage shop\.minutes: 1 entry waits, the oldest for .*, on s:stage: its query fails again and again\.",
        since_ms=began_ms,
        measured=True,
        link="/queries",
        command="millstream run FILE.py",
    )
    yield Expected(
        check="failed-queries",
        severity="problem",
        sentence=r"stage shop\.minutes: its query has failed 3 times in a row, and committed nothing in between: "
        rf"the last failure is {SECRET}; mend its cause, and start a new run, which takes over\.",
        since_ms=began_ms,
        link="/queries",
        command="millstream run FILE.py",
    )
    yield Expected(
        check="failed-queries",
        severity="problem",
        sentence=rf"shop\.bill: its query has failed 2 times in a row, .* is {SECRET}; .*",
        since_ms=began_ms + 1,
        link="/queries",
        command="millstream run FILE.py",
    )


def failures(client: Client, now_ms: int) -> Iterator[Expected]:
    """Processes that ended, a message that runs for long, dead letters that grow, and a pause."""
    began_ms = now_ms - HOUR_MS
    for number in range(2):
        record_restart(client, "shop", Restart(worker="w", incarnation=f"w-{number}", cause=SECRET))
    first, _ = client.execute("ZRANGE", restarts_key("shop"), 0, -1)
    client.execute("ZADD", restarts_key("shop"), "XX", now_ms + KEPT_MS - 300_000, first)
    run = LongRun(
        handler="shop.late",
        stream="s:late",
        id="1-0",
        key="4111",
        worker="late-0",
        started_ms=began_ms,
        time_limit_ms=300_000,
    )
    report_long_runs(client, "shop", [run])
    keys = HandlerKeys("shop", "late", "s:late")
    for at_ms in (began_ms, now_ms - 60_000):
        client.execute("XADD", keys.dead_letters, f"{at_ms}-0", "n", 1)
    why = Pause(by="breaker", at_ms=began_ms, cause="failed", count=9, of=9, error=SECRET)
    CommitStore(client, app="shop", handler="held").set_paused(["s:held"], paused=True, why=why)
    yield Expected(
        check="restarts",
        severity="warning",
        sentence=rf"shop: 2 restarts of worker processes within 10 min: the last .* ago: w {SECRET}; .*",
        since_ms=now_ms - 300_000,
        measured=True,
        link="/workers",
        command="millstream dlq list --reason crashed",
    )
    yield Expected(
        check="long-runs",
        severity="warning",
        sentence=r"shop\.late: message 1-0 of s:late, key 4111, has been running for .*",
        since_ms=began_ms,
        link="/workers",
        command="millstream key list shop.late",
    )
    yield Expected(
        check="dead-letters",
        severity="problem",
        sentence=r"shop\.late: 2 dead letters, 1 of them new within 15 min: these messages were not processed, .*",
        since_ms=now_ms - 60_000,
        link="/letters?handler=shop.late",
        command="millstream dlq list shop.late",
    )
    yield Expected(
        check="paused",
        severity="problem",
        sentence=rf"shop\.held: paused on s:held: it is .*{SECRET}.*; nothing new of it is processed\.",
        since_ms=began_ms,
        link=of_handler("held"),
        command="millstream resume shop.held",
    )


def stuck_keys(client: Client) -> Iterator[Expected]:
    """A key that is parked, and one that is blocked."""
    keyed = joined_by_field(client, "s:keyed", app="shop", handler="keyed")
    for key in ("parked", "blocked"):
        client.execute("XADD", "s:keyed", "*", "key", key)
    keyed.enqueue_new(count=10, max_pending=1_000)
    parked, blocked = keyed.lease_keys(queues=2, entries=10, run=2, lease_ms=60_000, now_ms=0).leases
    error = LastError(error="no", traceback="", attempts=2, blocks=True)
    keyed.release_leases(
        [LeaseRelease(parked, "park", "failed", 4), LeaseRelease(blocked, "backoff", 60_000, 2, error.pack())]
    )
    keys = HandlerKeys("shop", "keyed", "s:keyed")
    (park,) = client.execute("HVALS", keys.parked)
    parked_ms = int(park.partition(b" ")[0])
    ((last, _),) = client.execute("XREVRANGE", "s:keyed", "+", "-", "COUNT", 1)
    failed_ms = int(client.execute("HGET", keys.crashes, last + SINCE_SUFFIX.encode()))
    yield Expected(
        check="parked",
        severity="warning",
        sentence=r"shop\.keyed: 1 parked key: its messages wait until an operator unparks the key\.",
        since_ms=parked_ms,
        link=of_handler("keyed"),
        command="millstream key list shop.keyed",
    )
    yield Expected(
        check="blocked",
        severity="warning",
        sentence=r"shop\.keyed: 1 blocked key: its first message has failed all its attempts .*",
        since_ms=failed_ms,
        link=of_handler("keyed"),
        command="millstream key list shop.keyed",
    )


def growth(client: Client, now_ms: int) -> Iterator[Expected]:
    """A stream of ten thousand entries that its group has finished."""
    began_ms = now_ms - HOUR_MS
    fill = "for n = 1, 10000 do redis.call('XADD', KEYS[1], ARGV[1] .. '-' .. n, 'n', n) end"
    client.execute("EVAL", fill, 1, "s:grown", began_ms)
    Group(client, "s:grown", "readers").create(f"{began_ms}-10000".encode(), entries_read=10_000)
    yield Expected(
        check="growth",
        severity="warning",
        sentence=r"s:grown: 10,000 entries that all groups have finished, and nothing trims: .*",
        since_ms=began_ms,
        link="/streams",
        command="redis-cli ",
    )


def in_the_data(client: Client) -> list[Expected]:
    """Every trouble of the data at once."""
    now_ms = server_time_ms(client)
    return [
        *unreadable_data(client),
        *consumers(client, now_ms),
        *backlogs(client, now_ms),
        *on_spark(client, now_ms),
        *failures(client, now_ms),
        *stuck_keys(client),
        *growth(client, now_ms),
    ]


def settings_of_redis(client: Client, folder: Path) -> Iterator[Expected]:
    """A server that evicts, is full, writes snapshots only, and cannot write them."""
    info = eventually(
        lambda: (one := info_of(client))["current_eviction_exceeded_time"] != "0" and one, "it to be full"
    )
    assert info
    started_ms = int(info["server_time_usec"]) // 1_000 - int(info["uptime_in_seconds"]) * 1_000
    (folder / "dump.rdb").mkdir()  # the snapshot cannot replace it
    client.execute("BGSAVE")
    eventually(lambda: info_of(client)["rdb_last_bgsave_status"] == "err", "the snapshot to fail")
    full_ms = int(info["server_time_usec"]) // 1_000 - int(info["current_eviction_exceeded_time"])
    yield Expected(
        check="eviction",
        severity="problem",
        sentence=r"Redis evicts keys at maxmemory \(maxmemory-policy allkeys-lru\): .*",
        since_ms=started_ms - 1_000,  # Redis has both in seconds
        measured=True,
        link="/redis",
        command="redis-cli ",
    )
    yield Expected(
        check="persistence",
        severity="warning",
        sentence=r"Redis writes snapshots only \(appendonly no, save 3600 1\): .*",
        since_ms=started_ms - 1_000,
        measured=True,
        link="/redis",
        command="redis-cli ",
    )
    yield Expected(
        check="memory",
        severity="problem",
        sentence=r"Redis uses .* of maxmemory \(524,288 bytes\): at maxmemory it refuses writes: .*",
        since_ms=full_ms - 1_000,
        measured=True,
        link="/redis",
        command="redis-cli ",
    )
    yield Expected(
        check="disk",
        severity="problem",
        sentence=r"the last snapshot of Redis failed \(rdb_last_bgsave_status\); none has succeeded since 20.*Z: .*",
        since_ms=int(info["rdb_last_save_time"]) * 1_000,
        link="/redis",
        command="df -h",
    )


def info_of(client: Client) -> dict[str, str]:
    return fields_of_info(client.execute("INFO"))


# --- The list ---


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers count as gone as soon as their name is free, and ages count from 0; no report ends within the test."""
    for name in ("query_progress", "long_runs"):
        monkeypatch.setattr(f"millstream.delivery.{name}.HELD_MS", 3_600_000)
    monkeypatch.setattr(inspection, "find_workers", partial(find_workers, idle_ms=0))
    page = import_module("millstream.services.console.views.overview")
    monkeypatch.setattr(page, "read_overview", partial(read_overview, old_ms=0))


@pytest.mark.usefixtures("at_once")
def test_each_trouble_of_the_data_is_a_sentence_with_its_start_its_page_and_its_command(client: Client) -> None:
    began_ms = server_time_ms(client)
    expected = in_the_data(client)
    assert {one.check for one in expected} | OF_REDIS | TRIED_ELSEWHERE == LISTED
    shown = overview(client.url)
    passed_ms = server_time_ms(client) - began_ms
    assert list(wrong_items(shown, expected, passed_ms)) == []
    assert not [one for one in shown if "hours: its query" in one.sentence], "it has failed once"
    hidden = overview(client.url, Level.FIGURES)
    redacted = overview(client.url, redact=lambda name, text: "(hidden)" if name == "error" else text)
    assert len(hidden) == len(redacted) == len(shown)
    assert [one for one in hidden if "4111" in one.sentence] == []
    assert [one for one in redacted if SECRET in one.sentence] == []
    stage = "stage shop.minutes: its query has failed 3 times in a row, and committed nothing in between."
    restarts = "shop: 2 restarts of worker processes within 10 min."
    for sentence in (stage, restarts):
        assert [sum(one.sentence == sentence for one in some) for some in (shown, hidden, redacted)] == [0, 1, 1]


def test_each_trouble_of_redis_is_a_sentence_with_its_start_as_far_as_redis_knows_it(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    extra = {"maxmemory": "512kb", "maxmemory-policy": "allkeys-lru", "appendonly": "no", "save": "3600 1"}
    with EmbeddedServer(data_dir=folder, extra=extra) as server, Client(server.url) as client:
        began_ms = server_time_ms(client)
        expected = list(settings_of_redis(client, folder))
        assert {one.check for one in expected} | {"reachable"} == OF_REDIS
        shown = overview(server.url)
        passed_ms = server_time_ms(client) - began_ms + 2_000
        assert list(wrong_items(shown, expected, passed_ms)) == []
        client.execute("CONFIG", "SET", "maxmemory", 0)
        starts = {one.check: one.since_ms for one in overview(server.url)}
        unset = [starts.pop(check) for check in ("eviction", "persistence", "memory")]
        assert unset == [None, None, None], "they may have been set at any time since the start"
        client.execute("CONFIG", "RESETSTAT")
        assert [one.since_ms for one in overview(server.url) if one.check == "persistence"] == [None]
        (folder / "dump.rdb").rmdir()
        server.stop()
        (away,) = read_overview(client).attention
    assert (away.check, away.severity, away.since_ms) == ("reachable", "problem", None)
    assert sentence_of(away, with_content=True).endswith(": nothing can be read or written.")


def test_the_page_names_every_check_of_the_list_with_its_start_or_as_one_without() -> None:
    text = PAGE.read_text().partition("**Starts of items.**")[2].partition("**From a stuck key")[0]
    table, _, never = text.partition("These items never have one")
    assert set(re.findall(r"`([\w-]+)`", never)) == WITHOUT_START
    assert set(re.findall(r"`([a-z][\w-]+)`", table)) - {"maxmemory"} == LISTED - WITHOUT_START


def test_old_dead_letters_are_in_no_list_and_still_seen_until_new_ones_come(client: Client) -> None:
    joined_by_field(client, "orders", app="shop", handler="pay")
    letters = HandlerKeys("shop", "pay", "orders").dead_letters
    now_ms = server_time_ms(client)
    client.execute("XADD", letters, f"{now_ms - HOUR_MS}-0", "n", 1)
    with authorized(client.url, Level.PAYLOADS) as browser:
        page = browser.get("/")
    assert [one for one in items(page.html) if one.check == "dead-letters"] == []
    assert "All handlers keep up. No entry waits. Older dead letters that wait for an operator: 1." in page.text
    assert re.search(r"shop\.pay \w+ .* 0 0 0 1 ", page.text), "the table of readers"
    (old,) = [
        one for one in call("doctor", "--json", url=client.url).json()["findings"] if one["check"] == "dead-letters"
    ]
    assert (old["severity"], old["what"]) == ("warning", "shop.pay: 1 dead letter")
    for at_ms in (now_ms - 2, now_ms - 1):
        client.execute("XADD", letters, f"{at_ms}-0", "n", 1)
    with authorized(client.url, Level.PAYLOADS) as browser:
        page = browser.get("/")
    (new,) = [one for one in items(page.html) if one.check == "dead-letters"]
    assert (new.severity, new.since_ms) == ("problem", now_ms - 2)
    assert new.sentence.startswith("shop.pay: 3 dead letters, 2 of them new within 15 min: ")
    assert "keep up" not in page.text
    client.pipeline([("XADD", letters, "*", "n", n) for n in range(250)])
    joined_by_field(client, "refunds", app="shop", handler="pay")
    client.execute("XADD", HandlerKeys("shop", "pay", "refunds").dead_letters, f"{now_ms - 3}-0", "n", 1)
    (new,) = [one for one in overview(client.url) if one.check == "dead-letters"]
    assert new.sentence.startswith("shop.pay: 254 dead letters, 201 or more of them new within 15 min: ")
    assert new.since_ms == now_ms - 3
