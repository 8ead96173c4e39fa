"""What `millstream info` shows: tables that fit a terminal, what is wrong first and in colours, and `--watch`."""

import re
from typing import Any

import pytest
from rich.cells import cell_len

from millstream.delivery.restarts import CRASH_LOOP, KEPT_MS, Restart, record_restart
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys, restarts_key
from millstream.redis_client.pipelining import server_time_ms
from tests.support.clocks import ScriptedTime
from tests.support.commandline import call, in_a_terminal

pytestmark = [pytest.mark.cli]

TERMINAL = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "60"}
RED, YELLOW = "\x1b[1;31m", "\x1b[33m"
LONG = HandlerKeys(
    "international-settlement", "reconcile_foreign_currency_accounts", "orders:eu-central-1:production:é中文"
)


def handler(
    client: Client,
    keys: HandlerKeys,
    *,
    done: int = 0,
    dead: int = 0,
    parked: int = 0,
    backing_off: int = 0,
    is_paused: bool = False,
    is_alive: bool = False,
) -> None:
    """A handler on workers that has committed `done` of five entries."""
    client.pipeline([("XADD", keys.stream, f"{number}-0", "n", number) for number in range(1, 6)])
    client.execute("XGROUP", "CREATE", keys.stream, keys.group, f"{done}-0")
    client.execute("HSET", keys.meta, "owner", "workers", "committed_id", f"{done}-0", "committed", done)
    if is_alive:
        client.execute("XGROUP", "CREATECONSUMER", keys.stream, keys.group, "vm-0")
    if is_paused:
        client.execute("HSET", keys.meta, "paused", "1")
    for number in range(dead):
        client.execute("XADD", keys.dead_letters, "*", "n", number)
    for number in range(parked):
        client.execute("HSET", keys.parked, f"kp{number}", "1 failed")
    for number in range(backing_off):
        client.execute("ZADD", keys.backoff, 1, f"kb{number}")


def plain(shown: str) -> list[str]:
    """Its lines without colours."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", shown).replace("\r", "").splitlines()


def test_no_table_is_wider_than_a_terminal_of_80_columns_and_names_keep_both_ends(client: Client) -> None:
    handler(client, LONG, dead=2, parked=1, is_paused=True)
    client.execute("XGROUP", "CREATE", LONG.stream, "billing-of-the-accounting-department-in-the-netherlands", "0")
    client.execute("XADD", "x" * 200, "1-0", "a", "b")
    shown = in_a_terminal("info", "--over", "1ms", url=client.url, env=TERMINAL).out
    lines = [line for line in plain(shown) if " is paused by an operator" not in line]
    assert max(map(cell_len, lines)) <= 80
    assert len(lines) == 11, (
        "a line for each of two readers and two streams, two headings with rules, two empty, advice"
    )
    assert re.match(r"intern\S*…\S*ounts  paused +0 +5 ", lines[2])
    assert re.match(r"billing\S*…\S*erlands  no consumers +0 +5 ", lines[3])
    piped = call("info", url=client.url).out
    assert "international-settlement.reconcile_foreign_currency_accounts" in piped
    assert LONG.stream in piped


def test_problems_come_first_and_are_coloured_in_a_terminal_only(client: Client) -> None:
    handler(client, HandlerKeys("shop", "a_sound", "s"), done=5, is_alive=True)
    handler(client, HandlerKeys("shop", "b_slow", "s2"), done=1, backing_off=3, is_alive=True)
    handler(client, HandlerKeys("shop", "c_paused", "s3"), done=5, is_paused=True)
    handler(client, HandlerKeys("shop", "d_gone", "s4"), done=2)
    handler(client, HandlerKeys("shop", "e_dead", "s5"), done=5, dead=7, is_alive=True)
    shown = in_a_terminal("info", "--limit", "5", url=client.url, env=TERMINAL).out
    assert "shop.c_paused is paused by an operator; to go on: millstream resume shop.c_paused" in shown
    rows = {line.split()[0]: line for line in shown.splitlines() if re.match("shop[.].* {2}", line)}
    assert list(rows) == ["shop.e_dead", "shop.d_gone", "shop.c_paused", "shop.b_slow", "shop.a_sound"]
    coloured = {name: re.findall(r"\x1b\[([0-9;]+)m *([^\x1b]*?) *\x1b\[0m", row) for name, row in rows.items()}
    assert coloured == {
        "shop.e_dead": [("1;31", "7")],
        "shop.d_gone": [("1;31", "not running")],
        "shop.c_paused": [("33", "paused")],
        "shop.b_slow": [("33", "3")],
        "shop.a_sound": [],
    }
    assert "3 readers need attention; see: millstream doctor" in shown
    without = in_a_terminal("info", url=client.url, env={**TERMINAL, "NO_COLOR": "1"}).out
    assert RED not in without
    assert YELLOW not in without
    assert "\x1b" not in call("info", url=client.url).out


def statuses(client: Client) -> dict[str, str]:
    return {one["name"]: one["status"] for one in call("info", "--json", url=client.url).json()["readers"]}


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"done": 5}, "idle"),
        ({"done": 5, "is_alive": True}, "running"),
        ({"done": 3, "is_alive": True}, "running"),
        ({"done": 3}, "not running"),
        ({"done": 3, "is_paused": True}, "paused"),
        ({"done": 3, "is_paused": True, "is_alive": True}, "paused"),
    ],
)
def test_the_status_of_a_reader_follows_from_its_figures(client: Client, given: dict[str, Any], status: str) -> None:
    handler(client, HandlerKeys("shop", "h", "s"), **given)
    assert statuses(client) == {"shop.h": status}


@pytest.mark.parametrize(("is_alive", "status"), [(True, "crash loop"), (False, "not running")])
def test_a_reader_of_which_nothing_is_alive_is_not_running_also_after_a_crash_loop(
    client: Client, is_alive: bool, status: str
) -> None:
    handler(client, HandlerKeys("shop", "h", "s"), done=3, is_alive=is_alive)
    for number in range(CRASH_LOOP):
        record_restart(client, "shop", Restart(worker="vm-0", incarnation=f"{number}", cause="was killed"))
    assert statuses(client) == {"shop.h": status}


def test_handlers_of_an_app_whose_processes_end_again_and_again_are_in_a_crash_loop_for_two_minutes(
    client: Client,
) -> None:
    handler(client, HandlerKeys("shop", "h", "s"), done=3, is_alive=True)
    handler(client, HandlerKeys("depot", "h", "s2"), done=3, is_alive=True)
    for number in range(CRASH_LOOP):
        assert statuses(client) == {"shop.h": "running", "depot.h": "running"}, number
        record_restart(client, "shop", Restart(worker="vm-0", incarnation=f"i-{number}", cause="was ended by SIGSEGV"))
    assert statuses(client) == {"shop.h": "crash loop", "depot.h": "running"}
    shown = in_a_terminal("info", url=client.url, env=TERMINAL).out
    assert re.search(r"\x1b\[1;31m *crash loop *\x1b\[0m", shown)
    assert "shop: 3 restarts of worker processes within 10 min; the last " in call("info", url=client.url).out
    key, until_ms = restarts_key("shop"), server_time_ms(client) + KEPT_MS - 120_000
    for member in client.execute("ZRANGE", key, 0, -1):
        client.execute("ZADD", key, "XX", until_ms, member)
    assert statuses(client)["shop.h"] == "running", "the last one was two minutes ago"


def test_info_reports_a_redis_that_refuses_writes_for_lack_of_memory(client: Client) -> None:
    client.execute("XADD", "s", "*", "n", 1)
    assert call("info", "--json", url=client.url).json()["problems"] == []
    client.execute("CONFIG", "SET", "maxmemory", "1mb")
    try:
        shown = call("info", url=client.url)
        (problem,) = call("info", "--json", url=client.url).json()["problems"]
    finally:
        client.execute("CONFIG", "SET", "maxmemory", "0")
    assert "of maxmemory (1,048,576 bytes): at maxmemory it refuses writes" in problem
    # Memory in use differs from one call to the next, so its percentage is no part of the comparison.
    assert re.sub(r"\d+%", "N%", f"{problem}; see: millstream doctor\n") in re.sub(r"\d+%", "N%", shown.err)


def test_a_status_sums_up_the_streams_and_a_group_without_consumers_is_no_fault(client: Client) -> None:
    handler(client, HandlerKeys("shop", "h", "s"), done=5, is_paused=True)
    handler(client, HandlerKeys("shop", "h", "s2"), done=5)
    client.execute("XGROUP", "CREATE", "s", "progress", "0")
    assert statuses(client) == {"shop.h": "partly paused", "progress": "no consumers"}
    client.execute("XGROUP", "CREATECONSUMER", "s", "progress", "one")
    handler(client, HandlerKeys("shop", "h", "s3"), done=4)
    assert statuses(client)["shop.h"] == "not running", "on one of its streams entries wait"
    client.execute("HSET", HandlerKeys("shop", "h", "s2").meta, "committed_id", "nonsense")
    assert statuses(client) == {"shop.h": "unreadable", "progress": "running"}


# --- --watch ---


def play(monkeypatch: pytest.MonkeyPatch, script: ScriptedTime) -> None:
    """Let `info` have this time."""
    monkeypatch.setattr("millstream.cli.info.time", script)
    monkeypatch.setattr("millstream.cli.screen.time", script)


def test_watch_prints_an_object_for_each_interval_with_the_rates_since_the_last_one(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = HandlerKeys("shop", "h", "s")
    handler(client, keys, done=1, is_alive=True)
    script = ScriptedTime(
        lambda: client.execute("XADD", "s", "*", "n", 6),
        lambda: client.execute("HSET", keys.meta, "committed", 9),
        lambda: None,
        lambda: None,
        lambda: client.execute("HSET", keys.meta, "committed", 10),
    )
    play(monkeypatch, script)
    ended = call("info", "shop", "--watch", "4s", "--json", url=client.url)
    rows = [report["readers"][0] for report in ended.json_lines()]
    assert (ended.code, script.slept_s) == (130, [4.0] * 6)
    assert [(one.get("arriving_per_s"), one.get("done_per_s")) for one in rows] == [
        (None, None),
        (0.25, 0.0),
        (0.0, 2.0),
        (0.0, 0.0),
        (0.0, 0.0),
        (0.0, 0.25),
    ]
    assert {one["status"] for one in rows} == {"running"}, "eight seconds without a commit are nothing yet"


def test_a_reader_that_completes_nothing_for_long_makes_no_progress(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler(client, HandlerKeys("shop", "stands", "s"), done=1, is_alive=True)
    handler(client, HandlerKeys("shop", "has_nothing_to_do", "s2"), done=5, is_alive=True)
    play(monkeypatch, ScriptedTime(*[lambda: None] * 3))
    reports = call("info", "--watch", "5s", "--json", url=client.url).json_lines()
    assert [[one["status"] for one in report["readers"] if "stands" in one["name"]] for report in reports] == [
        ["running"],
        ["running"],
        ["no progress"],
        ["no progress"],
    ]
    assert {one["status"] for report in reports for one in report["readers"] if "nothing" in one["name"]} == {"running"}


def test_watch_survives_a_time_without_redis(
    millstream_fresh_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = millstream_fresh_server
    with Client(server.url) as client:
        handler(client, HandlerKeys("shop", "h", "s"), done=5)
    script = ScriptedTime(server.kill, lambda: None, server.restart, lambda: None)
    play(monkeypatch, script)
    ended = call("info", "--watch", "--json", url=server.url)
    assert ended.code == 130
    assert len(ended.json_lines()) >= 2, "before and after"
    assert "cannot be reached" in ended.err
    assert set(script.slept_s) == {2.0}, "it does not ask all the time"
    assert call("info", "--watch", url="redis://127.0.0.1:1/0").code == 3


@pytest.mark.parametrize(
    ("words", "every_s"),
    [(("--watch",), 2.0), (("--watch", "shop"), 2.0), (("--watch", "7s", "shop"), 7.0), (("shop", "--watch=1m"), 60.0)],
)
def test_watch_needs_no_interval(
    client: Client, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], every_s: float
) -> None:
    script = ScriptedTime()
    play(monkeypatch, script)
    handler(client, HandlerKeys("shop", "h", "s"))
    assert "shop.h" in call("info", *words, url=client.url).out
    assert script.slept_s == [every_s]
    assert call("info", "--watch=soon", url=client.url).code == 2
    assert call("info", "--watch=0s", url=client.url).code == 2


def test_watch_redraws_the_screen_of_a_terminal_and_cuts_the_report_to_its_height(client: Client) -> None:
    for number in range(30):
        client.execute("XADD", f"s{number:02}", "1-0", "a", "b")
    clear, home, end = "\x1b[2J", "\x1b[H", "\x1b[J"
    env = {**TERMINAL, "LINES": "12"}
    # The second is whole once the third begins.
    ended = in_a_terminal("info", "--watch", "100ms", url=client.url, env=env, until=f"{end}{home}".encode(), times=2)
    assert ended.code == 130
    first, second = (plain(part) for part in ended.out.split(home)[1:3])
    assert ended.out.count(clear) == 1, "what was on the screen is cleared once"
    assert len(first) == len(second) == 11
    assert first[-1] == "... 24 more lines"
    assert "every 100ms; Ctrl-C ends it" in first[0]


def test_watch_prints_one_report_after_another_into_a_pipe(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, ScriptedTime(lambda: None))
    client.execute("XADD", "s", "1-0", "a", "b")
    shown = call("info", "--watch", url=client.url)
    assert shown.out.count("every 2s; Ctrl-C ends it") == 2
    assert "\x1b" not in shown.out
