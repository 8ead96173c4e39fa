"""`millstream top`: what handlers do now, in a terminal, in a pipe and as JSON, and what it costs Redis."""

import json
import re
import subprocess
from typing import Any

import pytest

from millstream.admin.handler_activity import ActivityReader, HandlerActivity
from millstream.admin.redis_metrics import REST, all_places
from millstream.admin.time_inputs import Duration
from millstream.cli.screen import show_repeatedly
from millstream.delivery.keyed_stream import LeaseRelease
from millstream.delivery.last_error import LastError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, live_workers_key, run_name, worker_name_key
from millstream.redis_client.pipelining import server_time_ms
from tests.support.clocks import ManualClock, ScriptedTime
from tests.support.command_stats import commands_run
from tests.support.commandline import call, in_a_terminal, running
from tests.support.keyed_fixtures import keys_in_each_state

pytestmark = [pytest.mark.cli]

TERMINAL = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "20"}
FAST = ("--interval", "100ms")
PAY, PLAIN = HandlerKeys("shop", "pay", "orders"), HandlerKeys("shop", "plain", "s")


def add_handler(client: Client, keys: HandlerKeys, entries: int = 3) -> None:
    """A handler on workers that has committed none of its entries."""
    client.pipeline([("XADD", keys.stream, f"{n}-0", "n", n) for n in range(1, entries + 1)])
    client.execute("XGROUP", "CREATE", keys.stream, keys.group, "0")
    client.execute("HSET", keys.meta, "owner", "workers", "committed_id", "0-0")


def activity_of(client: Client, label: str) -> HandlerActivity:
    return next(one for one in ActivityReader(client, all_places).read() if one.handler == label)


def rows(client: Client, *words: str) -> list[dict[str, Any]]:
    (line,) = call("top", *words, *FAST, "--once", "--json", url=client.url).json_lines()
    found: list[dict[str, Any]] = line["handlers"]
    return found


def test_each_handler_is_shown_with_what_waits_and_what_is_stuck(fresh_client: Client) -> None:
    keys_in_each_state(fresh_client)
    add_handler(fresh_client, PLAIN)
    fresh_client.execute("XADD", PLAIN.dead_letters, "*", "n", 1)
    found = {one["handler"]: one for one in rows(fresh_client)}
    assert list(found) == ["shop.pay", "shop.plain"], "those with most waiting messages come first"
    pay = found["shop.pay"]
    assert {
        name: pay[name] for name in ("waiting", "in_flight", "unread", "ready", "leased", "backing_off", "parked")
    } == {
        "waiting": 11,
        "in_flight": 2,
        "unread": 0,
        "ready": 1,
        "leased": 1,
        "backing_off": 1,
        "parked": 1,
    }
    plain = found["shop.plain"]
    assert (plain["waiting"], plain["unread"], plain["dead_letters"], plain["streams"]) == (3, 3, 1, 1)
    assert plain["oldest_age_ms"] > 0


def test_the_rate_is_that_of_commits_since_the_reading_before(fresh_client: Client) -> None:
    add_handler(fresh_client, PLAIN)
    clock = ManualClock()
    reader = ActivityReader(fresh_client, all_places, clock=clock)
    assert [one.committed_per_s for one in reader.read()] == [None]
    fresh_client.execute("HINCRBY", PLAIN.meta, "committed", 50)
    clock.now_ms += 2_000
    assert [one.committed_per_s for one in reader.read()] == [25.0]
    clock.now_ms += 2_000
    assert [one.committed_per_s for one in reader.read()] == [0.0]
    fresh_client.execute("HSET", PLAIN.meta, "committed", 10)
    clock.now_ms += 2_000
    assert [one.committed_per_s for one in reader.read()] == [0.0], "its progress was reset"
    add_handler(fresh_client, HandlerKeys("shop", "plain", "s2"))
    clock.now_ms += 60_000
    assert [one.committed_per_s for one in reader.read()] == [None], "it has another stream, whose commits were before"


def test_blocked_keys_are_counted_while_they_back_off_and_while_they_run_again(fresh_client: Client) -> None:
    stream = keys_in_each_state(fresh_client)
    assert activity_of(fresh_client, "shop.pay").blocked == 0
    error = LastError(error="RuntimeError: no gateway", attempts=2, blocks=True)
    (lease,) = stream.lease_keys(queues=1, entries=1, run=1, lease_ms=60_000, now_ms=0).leases
    stream.release_leases([LeaseRelease(lease, "backoff", 60_000, 2, error.pack())])
    assert activity_of(fresh_client, "shop.pay").blocked == 1
    fresh_client.execute("ZREM", PAY.backoff, "kb")
    fresh_client.execute("ZADD", PAY.backoff, 1, lease.queue)
    stream.lease_keys(queues=1, entries=1, run=1, lease_ms=60_000, now_ms=0)
    assert activity_of(fresh_client, "shop.pay").blocked == 1
    fresh_client.execute("SET", PAY.crashes, "no hash")
    assert activity_of(fresh_client, "shop.pay").blocked == 0, "unreadable data ends nothing"


def test_announced_workers_and_runs_are_alive(fresh_client: Client) -> None:
    add_handler(fresh_client, PLAIN)
    assert activity_of(fresh_client, "shop.plain").workers == 0
    now_ms = server_time_ms(fresh_client)
    fresh_client.execute(
        "ZADD", live_workers_key("shop", "plain"), now_ms + 60_000, "w-0", now_ms + 60_000, "w-1", 1, "gone"
    )
    assert activity_of(fresh_client, "shop.plain").workers == 2
    fresh_client.execute("SET", worker_name_key("shop", run_name("plain")), "token")
    assert activity_of(fresh_client, "shop.plain").workers == 3


def test_an_idle_handler_costs_as_many_commands_for_its_workers_and_keys_however_many_streams_it_has(
    fresh_client: Client,
) -> None:
    found = []
    for number in (20, 40):
        for n in range(number - 20, number):
            add_handler(fresh_client, HandlerKeys("shop", "plain", f"s:{n}"), entries=1)
        reader = ActivityReader(fresh_client, all_places, clock=ManualClock())
        reader.read()
        before = commands_run(fresh_client.execute)
        reader.read()
        found.append(commands_run(fresh_client.execute) - before)
    few, many = found
    assert "scan" not in many, "streams are not looked for each time"
    assert "xinfo|stream" not in many
    assert "xinfo|consumers" not in many
    assert (few["exists"], few["hlen"]) == (many["exists"], many["hlen"])
    assert sum(many.values()) - sum(few.values()) <= 20 * 8


def test_reading_takes_at_most_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time = ScriptedTime(lambda: None, lambda: None)
    monkeypatch.setattr("millstream.cli.screen.time", time)
    took_s = iter((0.01, 3.0, 0.0))

    def read() -> None:
        time.sleep_ms(next(took_s) * 1000)

    with pytest.raises(KeyboardInterrupt):
        show_repeatedly(Duration("2s"), read, lambda _: None, as_json=True, rest=REST)
    assert [round(one, 6) for one in time.slept_s] == [1.99, 27.0, 2.0]


def test_a_name_selects_an_app_or_a_handler(fresh_client: Client) -> None:
    add_handler(fresh_client, PLAIN)
    add_handler(fresh_client, HandlerKeys("bank", "book", "s2"))
    assert [one["handler"] for one in rows(fresh_client, "bank")] == ["bank.book"]
    assert [one["handler"] for one in rows(fresh_client, "shop.plain")] == ["shop.plain"]
    unknown = call("top", "shop.none", *FAST, url=fresh_client.url)
    assert (unknown.code, "no handler 'shop.none' has run on this Redis" in unknown.err) == (1, True)


def test_in_a_pipe_the_figures_are_shown_once_with_rates(fresh_client: Client) -> None:
    assert call("top", *FAST, url=fresh_client.url).err == "no handler has run on this Redis\n"
    add_handler(fresh_client, PLAIN)
    call("pause", "shop.plain", url=fresh_client.url)
    shown = call("top", *FAST, url=fresh_client.url)
    heading, row = shown.out.splitlines()
    assert heading.split() == [
        "handler",
        "done/s",
        "waiting",
        "unread",
        "oldest",
        "busy",
        "parked",
        "blocked",
        "dead",
        "alive",
    ]
    assert row.split()[:4] == ["shop.plain", "0.0", "3", "3"]
    assert shown.err == "shop.plain is paused on 1 stream; to go on: millstream resume shop.plain\n"
    assert shown.code == 0


def test_json_is_a_line_for_each_interval_until_it_is_stopped(fresh_client: Client) -> None:
    add_handler(fresh_client, PLAIN)
    with running("top", *FAST, "--json", url=fresh_client.url, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
    assert [line["handlers"][0]["committed_per_s"] for line in lines] == [0.0] * 3
    assert lines[0]["at_ms"] < lines[1]["at_ms"] < lines[2]["at_ms"]


def test_a_terminal_shows_them_in_place_until_ctrl_c_and_colours_what_is_wrong(fresh_client: Client) -> None:
    add_handler(fresh_client, HandlerKeys("international-settlement", "reconcile_accounts", "s"))
    keys_in_each_state(fresh_client)
    clear, end = "\x1b[2J", "\x1b[J"
    shown = in_a_terminal("top", *FAST, url=fresh_client.url, env=TERMINAL, until=f"{end}\x1b[H".encode())
    assert shown.code == 130
    assert shown.out.count(clear) == 1
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", shown.out).replace("\r", "").splitlines()
    assert max(map(len, plain)) <= 80
    assert re.search(r"^inter…unts +\? ", "\n".join(plain), re.M)
    (row,) = {line for line in shown.out.splitlines() if line.startswith("shop.pay") and " ? " in line}
    assert re.findall(r"\x1b\[([0-9;]+)m *([^\x1b]*?) *\x1b\[0m", row) == [("33", "1"), ("1;31", "0")]


def test_once_ends_in_a_terminal_too(fresh_client: Client) -> None:
    add_handler(fresh_client, PLAIN)
    shown = in_a_terminal("top", *FAST, "--once", url=fresh_client.url, env=TERMINAL)
    assert (shown.code, "Ctrl-C" in shown.out, "shop.plain" in shown.out) == (0, False, True)


def test_handlers_that_the_user_may_not_access_are_left_out_and_counted(fresh_client: Client) -> None:
    add_handler(fresh_client, PLAIN)
    add_handler(fresh_client, HandlerKeys("bank", "book", "s2"))
    fresh_client.execute(
        "ACL", "SETUSER", "some", "on", ">secret", "+@all", "~s", "~millstream:{s}*", "~millstream:worker:*"
    )
    url = fresh_client.url.replace("redis://", "redis://some:secret@", 1)
    shown = call("top", *FAST, url=url)
    assert ("shop.plain" in shown.out, "bank.book" in shown.out) == (True, False)
    assert shown.err == "not shown: 1 handler that this Redis user may not access\n"
    for readable in ("none", "s"):
        fresh_client.execute("ACL", "SETUSER", "some", "resetkeys", f"~{readable}")
        assert call("top", *FAST, url=url).code == 3, readable


@pytest.mark.parametrize("words", [("--interval", "soon"), ("--interval", "1ms"), ("a.b.c",)])
def test_what_is_no_interval_or_name_is_wrong_usage(fresh_client: Client, words: tuple[str, ...]) -> None:
    assert call("top", *words, url=fresh_client.url).code == 2
