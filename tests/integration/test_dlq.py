"""Dead letters: found, shown byte for byte, redriven once, and deleted."""

import itertools
import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.delivery.commit_store import CommitStore
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue
from millstream.delivery.effects import Effects
from millstream.errors import AccessDenied, ConfigError, OutOfMemory
from millstream.handlers.dead_letter import DeadLetter, Reason
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import REDRIVE_FIELD, HandlerKeys
from millstream.testing.proxy import Proxy, Side
from tests.support.commandline import call, start
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.worker]

KEYS = HandlerKeys("airline", "departure", "flights")
MARK = [REDRIVE_FIELD, b"airline.departure"]
_buried = itertools.count(1)  # 0 is what Redis itself begins with in each millisecond
BOTH = "return redis.call('XLEN', KEYS[1]) + redis.call('XLEN', KEYS[2])"
KILLS = 200 if os.environ.get("MILLSTREAM_SOAK") else 6
MOST_MOVED = 400
"""How many letters each process is given that is killed: it cannot end before that."""


def letter(
    original: str = "1-0",
    *,
    pairs: Sequence[bytes] = (b"n", b"1"),
    key: bytes | None = b"N1",
    reason: Reason = "failed",
    keys: HandlerKeys = KEYS,
) -> DeadLetter:
    """A dead letter of the entry `original`."""
    return DeadLetter(
        stream=keys.stream,
        id=original,
        pairs=pairs,
        key=key,
        app=keys.app,
        handler=keys.handler,
        attempts=4,
        reason=reason,
        error="ValueError: no delay\nat all",
        traceback='Traceback:\n  File "airline.py", line 1\nValueError: no delay',
        time_ms=int(time.time() * 1000),
    )


def write_dead_letter(client: Client, *letters: DeadLetter) -> list[str]:
    """Have messages die, and return the ids of their dead letters: no two are the same, in whatever queues they are."""
    ids = [f"{time.time_ns() // 1_000_000}-{next(_buried)}" for _ in letters]
    boxes = [HandlerKeys(d.app, d.handler, d.stream).dead_letters for d in letters]
    commands = [("XADD", *where, *letter.items()) for *where, letter in zip(boxes, ids, letters, strict=True)]
    for reply in client.pipeline(commands):
        raise_if_error(reply)
    return ids


def entries(client: Client, stream: str = "flights") -> list[list[bytes]]:
    """The names and values of all entries of a stream."""
    return [pairs for _, pairs in client.execute("XRANGE", stream, "-", "+")]


def redriven(client: Client, stream: str = "flights") -> list[int]:
    """The numbers in the first field of a stream's entries, each of which must begin with the redrive field."""
    found = entries(client, stream)
    assert all(pairs[:2] == MARK for pairs in found)
    return [int(pairs[3]) for pairs in found]


# --- Finding ---


def test_a_dead_letter_of_a_stream_whose_name_is_no_text_is_listed_and_redriven(client: Client) -> None:
    keys = HandlerKeys("airline", "departure", "\udcff\udcfe")
    (letter_id,) = write_dead_letter(client, letter(keys=keys))
    queue = DeadLetterQueue(client)
    (found,) = queue.find(DeadLetterFilter(app="airline", reason="failed"))
    assert found.letter is not None
    assert (found.letter_id, found.letter.stream) == (letter_id, keys.stream)
    (outcome,) = queue.redrive([found.ref])
    assert outcome.new_id is not None
    assert client.execute("XLEN", b"\xff\xfe") == 1


def test_dead_letters_are_listed_and_filtered(client: Client) -> None:
    other = HandlerKeys("airline", "arrival", "flights")
    elsewhere = HandlerKeys("shop", "order", "{shop}:orders")
    ids = write_dead_letter(
        client,
        letter("1-0"),
        letter("2-0", reason="rejected", key=None),
        letter("3-0", key=b"\xff"),
        letter("4-0", keys=other),
        letter("5-0", keys=elsewhere),
    )

    def listed(*args: str) -> list[str]:
        shown = call("dlq", "list", *args, "--json", url=client.url)
        assert shown.code == 0
        return [line["letter_id"] for line in shown.json_lines()]

    assert listed() == [ids[3], *ids[:3], ids[4]]
    assert listed("shop") == [ids[4]]
    assert listed("airline.departure") == ids[:3]
    assert listed("--stream", "flights") == [ids[3], *ids[:3]]
    assert listed("airline.departure", "--stream", "flights") == ids[:3]
    assert listed("--reason", "rejected") == [ids[1]]
    assert listed("airline", "--key", "N1") == [ids[3], ids[0]]
    assert listed("--key", "\\xff") == [ids[2]]
    assert listed("--since", "1h") == listed()
    assert listed("--since", "2999-01-01") == []
    assert listed("--limit", "2") == [ids[3], ids[0]]


def test_the_list_is_not_cut_in_a_pipe(client: Client) -> None:
    key, error = "k" * 200, "ValueError: " + "x" * 200
    write_dead_letter(client, replace(letter("1-0", key=key.encode()), error=error))
    shown = call("dlq", "list", url=client.url).out
    assert key in shown
    assert error in shown


def test_the_list_has_a_row_for_each_dead_letter(client: Client) -> None:
    write_dead_letter(client, *(letter(f"{number}-0") for number in range(1, 124)))
    shown = call("dlq", "list", url=client.url)
    lines = shown.out.splitlines()
    assert len(lines) == 101
    assert lines[0].split() == [
        "letter_id",
        "handler",
        "stream",
        "original",
        "key",
        "reason",
        "error",
        "attempts",
        "age",
    ]
    assert lines[1].split()[1:8] == ["airline.departure", "flights", "1-0", "N1", "failed", "ValueError:", "no"]
    assert "there are more" in shown.err
    assert call("dlq", "list", "--reason", "crashed", url=client.url).err == "there are no dead letters of these\n"
    for words in (("list", "x"), ("redrive", "x", "--yes"), ("purge", "x.y", "--yes")):
        misspelt = call("dlq", *words, url=client.url)
        assert (misspelt.code, "has run on this Redis; millstream info shows those that have" in misspelt.err) == (
            1,
            True,
        )


def test_dead_letters_are_counted_by_reason(client: Client) -> None:
    write_dead_letter(client, letter(), letter(), letter(reason="crashed"))
    counted = call("dlq", "list", "--count", "--json", url=client.url).json_lines()
    place = {"handler": "airline.departure", "stream": "flights"}
    assert counted == [{**place, "reason": "crashed", "count": 1}, {**place, "reason": "failed", "count": 2}]
    assert call("dlq", "list", "--count", url=client.url).out.splitlines()[2].split()[-2:] == ["failed", "2"]


@pytest.mark.parametrize(
    "foreign",
    [
        (b"what", b"ever"),
        (b"\xff\xfe", b"\x00"),
        (b"id", b"soon", *[part for pair in zip(*[iter(letter().items()[2:])] * 2, strict=True) for part in pair]),
        tuple(letter(keys=HandlerKeys("a", "b", "c")).items()),
        (*letter().items()[:-1], b"\xc1"),
        (*letter().items()[:-1], msgspec.msgpack.encode([1, 2])),
        (*letter().items(), b"attempts", b"many"),
        (*letter().items(), b"reason", b"boredom"),
    ],
)
def test_an_entry_that_is_no_dead_letter_is_shown_as_unreadable_and_never_redriven(
    client: Client, foreign: Sequence[bytes | str | int]
) -> None:
    foreign_id = client.execute("XADD", KEYS.dead_letters, "*", *foreign).decode()
    (good_id,) = write_dead_letter(client, letter())
    shown = call("dlq", "list", "--json", url=client.url).json_lines()
    assert [line["reason"] for line in shown] == ["unreadable", "failed"]
    assert call("dlq", "list", url=client.url).code == 0
    assert call("dlq", "list", "--reason", "unreadable", "--json", url=client.url).json()["letter_id"] == foreign_id
    assert call("dlq", "list", "--key", "N1", "--json", url=client.url).json()["letter_id"] == good_id
    assert call("dlq", "show", foreign_id, "--json", url=client.url).json()["reason"] == "unreadable"
    assert "problem" in call("dlq", "show", foreign_id, url=client.url).out
    back = call("dlq", "redrive", "--all", "--yes", "--json", url=client.url)
    assert back.code == 1
    assert back.json() == {"selected": 2, "redriven": 1, "dry_run": False}
    assert f"letter {foreign_id} was not redriven: it is no dead letter" in back.err
    assert [line["letter_id"] for line in call("dlq", "list", "--json", url=client.url).json_lines()] == [foreign_id]
    assert call("dlq", "purge", "--reason", "unreadable", "--yes", "--json", url=client.url).json()["purged"] == 1


def test_streams_of_other_programs_with_similar_names_stay_as_they_are(client: Client) -> None:
    client.execute("XADD", "millstream:x:dead", "*", "a", "b")
    client.execute("HSET", "millstream:{s}:s:a.h:dead", "not", "a stream")
    assert call("dlq", "list", "--json", url=client.url).out == ""
    assert call("dlq", "purge", "--all", "--yes", "--json", url=client.url).json()["selected"] == 0
    assert client.execute("XLEN", "millstream:x:dead") == 1


# --- Byte for byte ---


@settings(
    max_examples=400 if os.environ.get("MILLSTREAM_SOAK") else 25,
)
@given(
    fields=st.lists(st.tuples(st.binary(min_size=1), st.binary()), min_size=1, max_size=6),
    key=st.none() | st.binary(min_size=1),
)
def test_any_fields_are_redriven_byte_for_byte(
    client: Client, fields: list[tuple[bytes, bytes]], key: bytes | None
) -> None:
    client.execute("FLUSHALL")
    pairs = [part for field in fields for part in field]
    store = CommitStore(client, app=KEYS.app, handler=KEYS.handler)
    dead = letter("7-0", pairs=pairs, key=key)
    unit = Effects(b"k", b"", first_id="7-0", last_id="7-0", message_count=1, dead_letters=[dead.items()])
    store.commit({"flights": [unit]})

    box = DeadLetterQueue(client)
    (filed,) = box.find(DeadLetterFilter(key=key))
    assert filed.letter is not None
    assert (filed.letter.pairs, filed.letter.key, filed.letter.id) == (pairs, key, "7-0")
    shown = call("dlq", "show", filed.letter_id, "--json", url=client.url).json()
    assert _from_json(shown) == pairs
    assert call("dlq", "show", filed.letter_id, url=client.url).code == 0

    (moved,) = box.redrive(box.select(DeadLetterFilter()))
    assert client.execute("XRANGE", "flights", "-", "+") == [[str(moved.new_id).encode(), [*MARK, *pairs]]]
    assert client.execute("XLEN", KEYS.dead_letters) == 0


def _from_json(shown: dict[str, object]) -> list[bytes]:
    """The names and values that `dlq show --json` shows."""
    fields = shown["fields"]
    assert isinstance(fields, dict)
    pairs = shown.get("pairs", list(fields.items()))
    assert isinstance(pairs, list)
    parts = [part for pair in pairs for part in pair]
    return [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part.encode() for part in parts]


def test_a_dead_letter_is_shown_whole_and_escaped(client: Client) -> None:
    (letter_id,) = write_dead_letter(client, letter("9-3", pairs=[b"note", b"\x1b[31m\xff", b"n", b"1"], key=b"\x07"))
    shown = call("dlq", "show", letter_id, url=client.url).out
    for expected in (
        f"letter_id  {letter_id}",
        "handler    airline.departure",
        "original   9-3",
        r"key        \x07",
        "reason     failed",
        r"error      ValueError: no delay\nat all",
        r"  note  \x1b[31m\xff",
        '  File "airline.py", line 1',
    ):
        assert f"{expected}\n" in shown
    in_json = call("dlq", "show", letter_id, "--json", url=client.url).json()
    assert in_json["fields"] == {"note": {"hex": "1b5b33316dff"}, "n": "1"}
    assert (in_json["id"], in_json["attempts"], in_json["key"]) == ("9-3", 4, "\x07")
    gone = call("dlq", "show", "1-1", url=client.url)
    assert gone.code == 1
    assert "there is no dead letter 1-1" in gone.err
    assert call("dlq", "show", "soon", url=client.url).code == 1, "no app of this name has run"
    assert call("dlq", "show", "1-1", "soon", url=client.url).code == 2


@pytest.mark.parametrize("words", [("list",), ("list", "--count"), ("purge", "--yes"), ("redrive", "--yes")])
def test_an_unknown_reason_is_refused_with_the_list_of_reasons(client: Client, words: tuple[str, ...]) -> None:
    write_dead_letter(client, letter("1-0"))
    refused = call("dlq", *words, "--reason", "nonsense", url=client.url)
    assert (refused.code, refused.out) == (2, "")
    assert "unknown dead-letter reason 'nonsense': use one of missing-key, " in refused.err
    assert ", canceled, unreadable" in refused.err
    assert call("dlq", *words, "--reason", "unreadable", url=client.url).code == 0


def test_a_megabyte_is_redriven_whole(client: Client) -> None:
    value = os.urandom(1_000_000)
    write_dead_letter(
        client, *(letter(f"{number}-0", pairs=[b"n", b"%d" % number, b"v", value]) for number in range(1, 61))
    )
    assert call("dlq", "redrive", "--all", "--yes", "--json", url=client.url).json()["redriven"] == 60
    assert [pairs[2:] for pairs in entries(client)] == [[b"n", b"%d" % n, b"v", value] for n in range(1, 61)]


# --- Redrive ---


def test_dead_letters_are_redriven_in_their_original_order(client: Client) -> None:
    order = list(range(1, 301))
    random.Random(3).shuffle(order)
    write_dead_letter(client, *(letter(f"{number}-{number % 3}", pairs=[b"n", b"%d" % number]) for number in order))
    assert call("dlq", "redrive", "--all", "--yes", "--json", url=client.url).json() == {
        "selected": 300,
        "redriven": 300,
        "dry_run": False,
    }
    assert redriven(client) == list(range(1, 301))


def test_ids_order_as_numbers_not_as_text(client: Client) -> None:
    write_dead_letter(client, *(letter(f"5-{number}", pairs=[b"n", b"%d" % number]) for number in (10, 9, 100, 1)))
    call("dlq", "redrive", "--all", "--yes", url=client.url)
    assert redriven(client) == [1, 9, 10, 100]


def test_only_the_selected_dead_letters_are_redriven(client: Client) -> None:
    ids = write_dead_letter(
        client,
        letter("1-0", pairs=[b"n", b"1"]),
        letter("2-0", pairs=[b"n", b"2"], reason="crashed"),
        letter("3-0", pairs=[b"n", b"3"], key=b"other"),
        letter("4-0", pairs=[b"n", b"4"]),
    )
    for args, expected in (
        (("--reason", "crashed"), [2]),
        (("--key", "other"), [2, 3]),
        ((ids[3],), [2, 3, 4]),
        (("airline", "--limit", "1"), [2, 3, 4, 1]),
    ):
        assert call("dlq", "redrive", *args, "--yes", url=client.url).code == 0
        assert redriven(client) == expected
    assert client.execute("XLEN", KEYS.dead_letters) == 0


def test_redrive_and_purge_need_a_selection_and_consent(client: Client) -> None:
    (letter_id,) = write_dead_letter(client, letter())
    for command in ("redrive", "purge"):
        assert "or --all" in call("dlq", command, "--yes", url=client.url).err
        assert call("dlq", command, "--yes", url=client.url).code == 2
        unasked = call("dlq", command, "--all", url=client.url)
        assert unasked.code == 2
        assert "add --yes" in unasked.err
        gone = call("dlq", command, "5-5", "--yes", url=client.url)
        assert gone.code == 1
        assert "there is no dead letter 5-5" in gone.err
        dry = call("dlq", command, letter_id, "--dry-run", "--json", url=client.url).json()
        assert (dry["selected"], dry["dry_run"]) == (1, True)
        assert "1 dead letter would be" in call("dlq", command, "--all", "--dry-run", url=client.url).out
    assert client.execute("XLEN", KEYS.dead_letters) == 1
    assert client.execute("EXISTS", "flights") == 0


def test_an_id_that_two_handlers_use_needs_a_handler_or_stream(client: Client) -> None:
    other = HandlerKeys("airline", "arrival", "flights")
    for keys in (KEYS, other):
        client.execute("XADD", keys.dead_letters, "7-7", *letter(keys=keys).items())
    assert len(call("dlq", "show", "7-7", "--json", url=client.url).json_lines()) == 2
    unclear = call("dlq", "redrive", "7-7", "--yes", url=client.url)
    assert unclear.code == 2
    assert "give its handler too, or --stream" in unclear.err
    assert call("dlq", "redrive", "airline.arrival", "7-7", "--yes", url=client.url).code == 0
    assert entries(client)[0][1] == b"airline.arrival"
    assert client.execute("XLEN", KEYS.dead_letters) == 1


def test_dead_letters_of_many_handlers_and_streams_are_redriven_to_their_own_streams(client: Client) -> None:
    for number in range(1, 31):
        keys = HandlerKeys("a", f"h{number % 2}", f"{{tag}}s{number % 3}")
        write_dead_letter(client, letter(f"{number}-0", pairs=[b"n", b"%d" % number], keys=keys))
    assert call("dlq", "redrive", "a", "--yes", "--json", url=client.url).json()["redriven"] == 30
    for stream in range(3):
        found = entries(client, f"{{tag}}s{stream}")
        assert [int(pairs[3]) for pairs in found] == [number for number in range(1, 31) if number % 3 == stream]
        assert all(pairs[1] == f"a.h{int(pairs[3]) % 2}".encode() for pairs in found)


def test_a_message_that_dies_during_a_redrive_is_not_redriven_by_it(client: Client) -> None:
    write_dead_letter(client, *(letter(f"{number}-0") for number in range(1, 101)))
    box = DeadLetterQueue(client)
    outcomes = 0
    for outcome in box.redrive(box.select(DeadLetterFilter())):
        write_dead_letter(client, letter(str(outcome.new_id)))
        outcomes += 1
    assert outcomes == 100
    assert client.execute("XLEN", KEYS.dead_letters) == 100


@pytest.mark.parametrize("right", ["xdel", "xadd"])
def test_a_redrive_that_lacks_a_right_neither_doubles_nor_loses_the_dead_letter(client: Client, right: str) -> None:
    write_dead_letter(client, letter("1-0"))
    client.execute("ACL", "SETUSER", "clerk", "reset", "on", ">pw", "~*", "+@all", f"-{right}")
    with Client(client.url.replace("redis://", "redis://clerk:pw@")) as limited:
        box = DeadLetterQueue(limited)
        with pytest.raises(AccessDenied):
            list(box.redrive(box.select(DeadLetterFilter())))
    assert (client.execute("XLEN", KEYS.dead_letters), entries(client)) == (1, [])


def test_an_error_that_quotes_bytes_is_stored_as_readable_text(client: Client) -> None:
    write_dead_letter(client, replace(letter("1-0"), error="cannot read '\udc80'", traceback="\ud800"))
    (filed,) = DeadLetterQueue(client).find(DeadLetterFilter())
    assert filed.letter is not None
    assert (filed.letter.error, filed.letter.traceback) == (r"cannot read '\udc80'", r"\ud800")


def test_an_entry_with_too_many_fields_stays_and_the_error_names_a_remedy(client: Client) -> None:
    names = [b"n%d" % number for number in range(4_000)]
    wide_id, _ = write_dead_letter(
        client, letter("1-0", pairs=[part for name in names for part in (name, b"")]), letter("2-0")
    )
    done = call("dlq", "redrive", "--all", "--yes", "--json", url=client.url)
    assert done.code == 1
    assert f"letter {wide_id} was not redriven: its 4,000 fields are too many for one atomic step" in done.err
    assert done.json()["redriven"] == 1
    assert len(call("dlq", "show", wide_id, "--json", url=client.url).json()["fields"]) == 4_000


def test_a_stream_that_became_another_type_loses_no_dead_letter(client: Client) -> None:
    write_dead_letter(client, letter(), letter())
    client.execute("SET", "flights", "text")
    box = DeadLetterQueue(client)
    why = "cannot add to flights: the key holds no stream"
    assert [(one.new_id, one.problem) for one in box.redrive(box.select(DeadLetterFilter()))] == [(None, why)] * 2
    done = call("dlq", "redrive", "--all", "--yes", url=client.url)
    assert (done.code, done.err.count(f"was not redriven: {why}\n")) == (1, 2)
    assert client.execute("XLEN", KEYS.dead_letters) == 2


def test_a_full_redis_loses_no_dead_letter_and_is_reported(millstream_fresh_server: EmbeddedServer) -> None:
    with Client(millstream_fresh_server.url) as client:
        write_dead_letter(client, letter(), letter())
        client.execute("CONFIG", "SET", "maxmemory", "1")
        box = DeadLetterQueue(client)
        with pytest.raises(OutOfMemory):
            list(box.redrive(box.select(DeadLetterFilter())))
        done = call("dlq", "redrive", "--all", "--yes", url=client.url)
        assert done.code == 3
        assert "maxmemory" in done.err
        assert (client.execute("XLEN", KEYS.dead_letters), client.execute("EXISTS", "flights")) == (2, 0)
        assert call("dlq", "purge", "--all", "--yes", "--json", url=client.url).json()["purged"] == 2


def test_two_redrives_at_once_redrive_each_dead_letter_once(client: Client) -> None:
    write_dead_letter(client, *(letter(f"{number}-0", pairs=[b"n", b"%d" % number]) for number in range(1, 2_001)))
    outcomes: list[str | None] = []

    def redrive() -> None:
        with Client(client.url) as own:
            box = DeadLetterQueue(own)
            outcomes.extend(outcome.new_id for outcome in box.redrive(slips))

    slips = DeadLetterQueue(client).select(DeadLetterFilter())
    threads = [threading.Thread(target=redrive) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(redriven(client)) == list(range(1, 2_001))
    assert Counter(new_id is not None for new_id in outcomes) == {True: 2_000, False: 4_000}


class Standstill(Proxy):
    """A proxy that never forwards the `at`-th script: its client stands still there, until it is killed."""

    def __init__(self, port: int, *, at: int) -> None:
        self._scripts_left = at
        self._is_over = threading.Event()
        super().__init__(port)

    def cut_side(self, words: Sequence[bytes]) -> Side | None:
        """See Proxy."""
        self._scripts_left -= words[0] == b"EVALSHA"
        if self._scripts_left > 0:
            return super().cut_side(words)
        self._is_over.wait(FAIL_SAFE_S)
        return "before"

    def close(self) -> None:
        """See Proxy."""
        self._is_over.set()
        super().close()


@pytest.mark.faults
def test_a_redrive_that_is_killed_at_any_point_neither_loses_nor_doubles_a_dead_letter(
    millstream_server: EmbeddedServer, client: Client
) -> None:
    """SIGKILL in mid-redrive, again and again, each time after another number of moved dead letters."""
    total = KILLS * MOST_MOVED
    pairs = ([b"n", b"%d" % number] for number in range(1, total + 1))
    for chunk in zip(*[enumerate(pairs, 1)] * MOST_MOVED, strict=True):
        write_dead_letter(client, *(letter(f"{number}-0", pairs=fields) for number, fields in chunk))
    chance = random.Random(11)
    for _ in range(KILLS):
        before = client.execute("XLEN", "flights")
        with Standstill(millstream_server.port, at=MOST_MOVED) as proxy:
            process = start("dlq", "redrive", "--all", "--yes", url=proxy.url)
            try:
                target = before + chance.randrange(1, 250)
                while client.execute("XLEN", "flights") < target and process.poll() is None:
                    time.sleep(0.0005)
                assert process.poll() is None, "it was over before it was killed"
            finally:
                process.kill()
                process.communicate()
            # In one step: what was sent before the kill may still be on its way.
            assert client.execute("EVAL", BOTH, 2, "flights", KEYS.dead_letters) == total
    assert call("dlq", "redrive", "--all", "--yes", url=client.url).code == 0
    assert redriven(client) == list(range(1, total + 1))
    assert client.execute("XLEN", KEYS.dead_letters) == 0


# --- Purge ---


def test_purge_deletes_the_selected_dead_letters_and_no_others(client: Client) -> None:
    other = HandlerKeys("airline", "arrival", "flights")
    ids = write_dead_letter(client, letter(), letter(reason="crashed"), letter(key=b"x"), letter(keys=other))
    assert call("dlq", "purge", "--reason", "crashed", "--yes", url=client.url).out == "1 dead letter purged\n"
    assert call("dlq", "purge", ids[2], "--yes", "--json", url=client.url).json() == {
        "selected": 1,
        "purged": 1,
        "dry_run": False,
    }
    left = call("dlq", "list", "--json", url=client.url).json_lines()
    assert [line["letter_id"] for line in left] == [ids[3], ids[0]]
    assert call("dlq", "purge", "--all", "--yes", url=client.url).out == "2 dead letters purged\n"


def test_many_dead_letters_are_purged_in_several_calls(client: Client) -> None:
    write_dead_letter(client, *(letter(f"{number}-0") for number in range(1, 1_235)))
    assert call("dlq", "purge", "--all", "--yes", "--json", url=client.url).json()["purged"] == 1_234


def test_ids_are_checked_before_any_dead_letter_is_redriven(client: Client) -> None:
    box = DeadLetterQueue(client)
    write_dead_letter(client, letter())
    with pytest.raises(ConfigError, match="is not an entry id"):
        box.select(DeadLetterFilter(ids=("first",)))


def test_output_in_a_pipe_is_plain_and_json_parses_line_by_line(client: Client) -> None:
    write_dead_letter(client, letter(), letter(pairs=[b"\xff", "\u2028".encode()]))
    process = start("dlq", "list", "--json", url=client.url)
    parsed = subprocess.run(
        ["python3", "-c", "import json,sys; print([json.loads(line)['reason'] for line in sys.stdin])"],
        stdin=process.stdout,
        capture_output=True,
        text=True,
        check=True,
    )
    process.communicate()
    assert parsed.stdout == "['failed', 'failed']\n"
