"""Keys forged by a program that may write to Redis: they are shown as unreadable, escaped, and stop nothing else."""

import json
from collections.abc import Sequence

import msgspec
import pytest

from millstream.balancer import announce
from millstream.cli.terminal import print_details, print_line, print_message, print_table, print_text
from millstream.delivery.keyed_stream import KeyedStream, LeaseRelease
from millstream.delivery.reliable_stream import ReliableStream
from millstream.handlers.dead_letter import DeadLetter
from millstream.producer.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, ServiceKeys, StreamKeys
from millstream.redis_client.replies import mapping_of
from tests.support.commandline import Outcome, call
from tests.support.keyed_fixtures import joined_by_field

pytestmark = [pytest.mark.cli]

EVIL = "e\x1b]0;PWNED\x07\x1b[31m\x9b2Jvil\n\rerror: forged"
KEYS = HandlerKeys("shop", "bill", "orders")


def harmless(outcome: Outcome) -> Outcome:
    """It printed nothing that a terminal obeys, and no line that another program has written."""
    for text in (outcome.out, outcome.err):
        assert all(line.isprintable() for line in text.split("\n")), repr(text)
        assert not [line for line in text.split("\n") if line.startswith("error: forged")]
    return outcome


def letter(number: int, **fields: bytes | str) -> list[bytes | str | int]:
    """The items of a dead letter, with some of them forged."""
    made = DeadLetter(
        stream=KEYS.stream,
        id=f"{number}-0",
        pairs=[b"n", b"%d" % number],
        key=None,
        app=KEYS.app,
        handler=KEYS.handler,
        attempts=1,
        reason="failed",
        error="no",
        time_ms=1_700_000_000_000,
    )
    items = made.items()
    named: dict[bytes | str | int, bytes | str | int] = mapping_of(items)
    named.update(fields)
    return [part for pair in named.items() for part in pair]


# --- The one way out ---


def test_every_printed_text_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(EVIL)
    print_message(EVIL)
    print_table((EVIL, ">n"), [(EVIL, EVIL)])
    print_details([(EVIL, EVIL)])
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 4
    assert shown.err.count("\n") == 1
    print_text(EVIL)
    shown_lines = capsys.readouterr().out
    assert shown_lines.count("\n") == 2
    for text in (shown.out, shown.err, shown_lines):
        assert all(line.isprintable() for line in text.split("\n"))


# --- Dead letters ---


FORGED = {
    "a time that no calendar has": {"time_ms": "1" + "0" * 30},
    "a time of five thousand digits": {"time_ms": "9" * 5_000},
    "a time before all times": {"time_ms": "-1"},
    "an odd number of fields": {"fields": msgspec.msgpack.encode([b"n", b"1", b"m"])},
    "no fields": {"fields": msgspec.msgpack.encode([b""])},
    "attempts without end": {"attempts": "9" * 5_000},
    "an id of five thousand digits": {"id": "9" * 5_000 + "-1"},
    "another handler's name": {"handler": EVIL},
}


@pytest.mark.parametrize("fields", FORGED.values(), ids=FORGED)
def test_a_forged_dead_letter_is_shown_as_unreadable_and_stops_no_other(
    client: Client, fields: dict[str, bytes | str]
) -> None:
    client.execute("XADD", KEYS.dead_letters, "1-1", *letter(1))
    client.execute("XADD", KEYS.dead_letters, "2-1", *letter(2, **fields))
    client.execute("XADD", KEYS.dead_letters, "3-1", *letter(3, error=EVIL, traceback=EVIL))
    for command in (("dlq", "list"), ("dlq", "list", "--count"), ("dlq", "purge", "--all", "--dry-run")):
        assert harmless(call(*command, url=client.url)).code == 0
    listed = call("dlq", "list", "--json", url=client.url).json_lines()
    assert [one["reason"] for one in listed] == ["failed", "unreadable", "failed"]
    for letter_id in ("1-1", "2-1", "3-1"):
        assert harmless(call("dlq", "show", letter_id, url=client.url)).code == 0
        assert call("dlq", "show", letter_id, "--json", url=client.url).code == 0
    redriven = harmless(call("dlq", "redrive", "--all", "--yes", url=client.url))
    assert (redriven.code, redriven.out) == (1, "2 dead letters redriven\n")
    assert "letter 2-1 was not redriven" in redriven.err
    assert client.execute("XLEN", KEYS.stream) == 2
    assert client.execute("XLEN", KEYS.dead_letters) == 1


def test_a_dead_letter_queue_with_a_forged_name_is_shown_escaped_and_stops_no_other(client: Client) -> None:
    name = EVIL.replace(":", "")  # as in no name of a handler
    forged = HandlerKeys(name, name, f"{{t}}{EVIL}")
    client.execute("XADD", forged.dead_letters, "1-1", "a", "b")
    client.execute("XADD", KEYS.dead_letters, "2-1", *letter(2))
    for command in ("list", "list --count", "purge --all --dry-run", "redrive --all --dry-run", "show 1-1", "show 2-1"):
        assert harmless(call("dlq", *command.split(), url=client.url)).code == 0
    assert harmless(call("dlq", "redrive", "--all", "--yes", url=client.url)).out == "1 dead letter redriven\n"


def test_dead_letters_of_a_stream_that_cannot_be_written_stop_no_others(client: Client) -> None:
    other = HandlerKeys("shop", "bill", "payments")
    client.execute("XADD", KEYS.dead_letters, "1-1", *letter(1))
    client.execute("XADD", other.dead_letters, "2-1", *letter(2, stream="payments"))
    client.execute("XADD", HandlerKeys("shop", "bill", "zzz").dead_letters, "3-1", *letter(3, stream="zzz"))
    client.execute("SET", "payments", "text")
    redriven = call("dlq", "redrive", "--all", "--yes", url=client.url)
    assert (redriven.code, redriven.out) == (1, "2 dead letters redriven\n")
    assert "letter 2-1 was not redriven: cannot add to payments: the key holds no stream" in redriven.err


# --- Handlers ---


def join(client: Client, stream: str = KEYS.stream) -> HandlerKeys:
    client.execute("XADD", stream, "*", "n", 1)
    ReliableStream(client, stream, app="shop", handler="bill", consumer="w").join()
    return HandlerKeys("shop", "bill", stream)


@pytest.mark.parametrize(
    "fields",
    [
        *(
            ("committed_id", EVIL),
            ("committed_id", "9" * 5_000),
            ("committed_id", ""),
            ("committed", EVIL),
            ("dead", "9" * 5_000),
        ),
        *(("owner", EVIL), ("paused", EVIL), ("keyed", EVIL)),
    ],
)
def test_forged_progress_is_unreadable_and_the_other_handlers_are_shown(
    client: Client, fields: tuple[str, str]
) -> None:
    forged, sound = join(client), join(client, "payments")
    client.execute("HSET", forged.meta, *fields)
    shown = harmless(call("info", url=client.url))
    assert shown.code == 0
    reports = {one["stream"]: one for one in call("info", "--json", url=client.url).json()["handlers"]}
    assert reports[sound.stream]["problem"] is None
    assert reports[sound.stream]["lag"] == 1
    if fields[0] in ("committed_id", "committed", "dead"):
        assert reports[forged.stream]["problem"]
        assert "shop.bill on orders is unreadable" in shown.err
    for command in (
        ("group", "list", "orders"),
        ("pause", "shop.bill"),
        ("resume", "shop.bill"),
        ("key", "list", "shop.bill"),
        ("key", "list"),
    ):
        assert harmless(call(*command, url=client.url)).code == 0


@pytest.mark.parametrize("name", ["meta", "dead_letters", "parked"])
def test_a_handlers_key_of_another_type_stops_no_other_handler(client: Client, name: str) -> None:
    forged, sound = join(client), join(client, "payments")
    client.execute("DEL", getattr(forged, name))
    client.execute("SET", getattr(forged, name), EVIL)
    shown = harmless(call("info", url=client.url))
    assert shown.code == 0
    assert "shop.bill on orders is unreadable" in shown.err
    assert [one["problem"] is None for one in call("info", "--json", url=client.url).json()["handlers"]] == [
        False,
        True,
    ]
    assert sound.stream in shown.out


# --- Keys ---


@pytest.fixture
def stream(client: Client) -> KeyedStream:
    """A message of `a`, leased; of `b`, backing off; of `c`, parked for a forged reason; of `d`, ready."""
    opened = joined_by_field(client, "orders", app="shop", handler="bill")
    for key in "abcd":
        client.execute("XADD", "orders", "*", "key", key)
    opened.enqueue_new(count=100, max_pending=1_000)
    _, b, c = opened.lease_keys(queues=3, entries=100, run=2, lease_ms=60_000, now_ms=0).leases
    opened.release_leases([LeaseRelease(b, "backoff", 60_000, 1), LeaseRelease(c, "park", f"failed: {EVIL}", 4)])
    return opened


@pytest.mark.usefixtures("stream")
def test_the_reason_for_which_a_key_is_parked_is_shown_escaped(client: Client) -> None:
    shown = harmless(call("key", "list", "shop.bill", url=client.url))
    assert shown.code == 0
    assert r"failed: e\x1b]0;PWNED\x07\x1b[31m" in shown.out
    parked = call("key", "show", "shop.bill", "c", "--json", url=client.url).json()
    assert harmless(call("key", "show", "shop.bill", "c", url=client.url)).code == 0
    assert parked["parked"] == f"failed: {EVIL}"
    assert harmless(call("key", "park", "shop.bill", "d", "--reason", EVIL, url=client.url)).code == 0
    assert harmless(call("key", "list", "shop.bill", url=client.url)).code == 0


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    ("key", "command"),
    [
        (b"a", ("HSET", KEYS.owners, "ka", EVIL)),
        (b"a", ("HSET", KEYS.owners, "ka", f"{EVIL} 1 w")),
        (b"b", ("ZADD", KEYS.backoff, "inf", "kb")),
        (b"c", ("HSET", KEYS.parked, "kc", EVIL)),
        (b"d", ("SET", KEYS.queue(b"kd"), EVIL)),
    ],
)
def test_a_forged_key_queue_is_unreadable_and_the_others_are_shown(
    client: Client, key: bytes, command: Sequence[str]
) -> None:
    client.execute(*command)
    assert harmless(call("key", "list", "shop.bill", url=client.url)).code == 0
    shown = call("key", "list", "shop.bill", "--json", url=client.url).json_lines()
    assert {one["key"]: one["state"] == "unreadable" for one in shown} == {
        name: name == key.decode() for name in ("a", "b", "c", "d")
    }


@pytest.mark.usefixtures("stream")
def test_key_queues_of_another_type_are_named_and_those_on_other_streams_are_shown(client: Client) -> None:
    join(client, "payments")
    client.execute("DEL", KEYS.owners)
    client.execute("SET", KEYS.owners, EVIL)
    shown = harmless(call("key", "list", "shop.bill", url=client.url))
    assert shown.code == 0
    assert "shop.bill on orders is unreadable" in shown.err


# --- Services ---


@pytest.mark.parametrize("owner", [EVIL, "", "1", f"{EVIL} w", "9" * 5_000 + " w"], ids=range(5))
def test_a_forged_owner_of_a_stream_is_unreadable_and_the_others_are_shown(client: Client, owner: str) -> None:
    keys = ServiceKeys("calls")
    announce(client, "calls", "call:1")
    client.execute("HSET", keys.streams, "call:1", "1", "call:2", "2", EVIL, "3")
    client.execute("HSET", keys.owners, "call:1", owner, "call:2", "1700000000000000 w1")
    client.execute("HSET", keys.stream_errors, "call:2", f"1700000000000000 {EVIL}")
    client.execute("HSET", keys.consumers, "w1", "i 1 0", "w2", EVIL, EVIL, "i inf nan")
    client.execute("ZADD", keys.alive, "inf", "w1")
    shown = harmless(call("lease", "list", "calls", url=client.url))
    assert shown.code == 0
    found = call("lease", "list", "calls", "--json", url=client.url).json_lines()
    assert {one["stream"]: one["state"] for one in found} == {
        "call:1": "unreadable",
        "call:2": "excluded",
        EVIL: "free",
    }
    counted = call("lease", "list", "calls", "--count", "--json", url=client.url).json()
    assert {one["name"]: one["unreadable"] for one in counted["consumers"]} == {"w1": False, "w2": True, EVIL: True}


# --- Delayed messages ---


@pytest.mark.parametrize(
    "packed", [EVIL, "", msgspec.msgpack.encode(["odd"]), msgspec.msgpack.encode({"a": 1})], ids=range(4)
)
def test_a_forged_delayed_message_is_unreadable_and_the_others_are_shown(client: Client, packed: bytes | str) -> None:
    with Producer(client) as producer:
        producer.publish("orders", {"n": 1}, delay_ms=1_000_000)
    keys = StreamKeys("orders")
    client.execute("ZADD", keys.due, "inf", b"\xff")
    client.execute("HSET", keys.delayed, b"\xff", packed)
    shown = harmless(call("delayed", "list", "orders", url=client.url))
    assert shown.code == 0
    assert "unreadable" in shown.out
    rows = call("delayed", "list", "orders", "--json", url=client.url).json_lines()
    assert ["problem" in one for one in rows] == [False, True]
    assert json.dumps(rows[0]["fields"]) == '{"n": "1"}'
