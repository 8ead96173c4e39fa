"""A dead letter that was resent with other fields stays until its copy is committed, on both engines and wherever either
dies; if the copy becomes a dead letter, that takes its place and keeps the fields before the edit.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from millstream import Message, Reject
from millstream.admin.forgetting import Forgetting
from millstream.admin.key_queues import skip
from millstream.delivery.commit_store import COMMIT, CommitStore
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue
from millstream.delivery.keyed_stream import KeyedStream, queue_of_key
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import AccessDenied, MillstreamError, Unavailable, WrongType
from millstream.handlers.dead_letter import DeadLetter
from millstream.handlers.encoding import pack_output
from millstream.handlers.handler import Handler
from millstream.partitions.key_migration import FORWARD_ENTRY, forward_entry
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import EDITED_FIELD, REDRIVE_FIELD, HandlerKeys
from millstream.redis_client.scripts import Script
from millstream.testing.proxy import Proxy, Side
from tests.support.commandline import call
from tests.support.dead_letters import add_dead_letter
from tests.support.partition_fixtures import BASE, keys_of, moved_key
from tests.support.task_fixtures import TaskFixture
from tests.support.waiting import eventually
from tests.support.workers import KEYS, make, working

pytestmark = [pytest.mark.worker]

PAIRS = [b"k", b"a", b"n", b"-1"]
EVERY_KIND = pytest.mark.parametrize(
    ("lists", "options"),
    [(False, {}), (True, {"batch_size": 5}), (False, {"key": "k"}), (True, {"key": "k", "batch_size": 5})],
    ids=["single", "batch", "keyed", "keyed lists"],
)


def handler_of(*, lists: bool, into: str | None = None, **options: Any) -> Handler:
    """A handler that rejects negative numbers: of messages, or of lists of them."""

    def handle(message: Message) -> dict[str, str] | None:
        if (message.text("n") or "").startswith("-"):
            raise Reject("negative")
        return {"n": message.text("n") or ""} if into else None

    def handle_all(messages: list[Message]) -> list[dict[str, str]] | None:
        done = [handle(message) for message in messages]
        return [one for one in done if one] or None

    return make(handle_all if lists else handle, into=into, **options)


def letters(client: Client, keys: HandlerKeys = KEYS) -> list[DeadLetter]:
    return [DeadLetter.parse(*one) for one in client.execute("XRANGE", keys.dead_letters, "-", "+")]


def resend(client: Client, n: str, keys: HandlerKeys = KEYS, pairs: Sequence[bytes] = PAIRS) -> tuple[str, str]:
    """Resend a new dead letter with another number; the ids of both."""
    letter_id = add_dead_letter(client, pairs, keys=keys)
    queue = DeadLetterQueue(client)
    (ref,) = queue.select(DeadLetterFilter(app=keys.app, ids=(letter_id,)))
    new_id = queue.redrive_edited(ref, [*pairs[:3], n.encode()], by="ann").new_id
    assert new_id is not None
    return letter_id, new_id


def is_replaced(client: Client, letter_id: str) -> bool:
    """Whether another dead letter has taken the place of this one, with the fields before the edit."""
    (found,) = letters(client)
    return found.letter_id != letter_id and found.pairs_before_edit == PAIRS


@pytest.mark.parametrize("into", [None, "out"])
@EVERY_KIND
def test_on_workers_a_dead_letter_goes_with_the_commit_of_its_copy(
    client: Client, lists: bool, options: dict[str, Any], into: str | None
) -> None:
    client.execute("XADD", "in", "*", "k", "a", "n", "0")
    resend(client, "1")
    kept = add_dead_letter(client, PAIRS, keys=KEYS)
    with working(client, handler_of(lists=lists, into=into, **options)):
        eventually(lambda: [one.letter_id for one in letters(client)] == [kept], "the commit of the copy")
        eventually(lambda: client.execute("XLEN", "out") == (2 if into else 0), "that of the other message")
    assert client.execute("EXISTS", KEYS.resent) == 0


@EVERY_KIND
def test_on_workers_the_dead_letter_of_a_copy_takes_its_place_and_keeps_the_fields_before_the_edit(
    client: Client, lists: bool, options: dict[str, Any]
) -> None:
    letter_id, new_id = resend(client, "-2")
    with working(client, handler_of(lists=lists, **options)):
        eventually(lambda: is_replaced(client, letter_id), "the dead letter of the copy")
    (found,) = letters(client)
    assert (found.id, list(found.pairs)) == (new_id, [*PAIRS[:3], b"-2", EDITED_FIELD, b"ann"])
    assert client.execute("EXISTS", KEYS.resent) == 0


@EVERY_KIND
def test_on_spark_a_dead_letter_goes_with_its_copy_or_is_replaced(
    client: Client, lists: bool, options: dict[str, Any]
) -> None:
    bench, key = TaskFixture(client), b"a" if "key" in options else None
    for ms, number, dead in ((10, b"1", 0), (20, b"-2", 1)):
        letter_id = add_dead_letter(client, PAIRS, keys=KEYS)
        client.execute("HSET", KEYS.resent, f"{ms}-0", letter_id, f"l{letter_id}", f"{ms}-0")
        copy = {REDRIVE_FIELD: b"app.handle", b"k": b"a", b"n": number, EDITED_FIELD: b"ann"}
        others = [(ms + one, key, {b"k": b"a", b"n": b"5"}) for one in (-1, 1, 2)]
        handler = handler_of(lists=lists, into="out", **options)
        report = bench.process(handler, bench.rows((ms, key, copy), *others))
        assert (report["committed"], report["dead"], len(letters(client))) == (4, dead, dead)
        assert client.execute("EXISTS", KEYS.resent) == 0
    assert is_replaced(client, letter_id)


def test_the_fields_before_the_first_edit_are_kept_and_can_be_resent(client: Client) -> None:
    letter_id, _ = resend(client, "-2")
    with working(client, handler_of(lists=False)):
        for number in ("-3", "-4"):
            eventually(lambda one=letter_id: is_replaced(client, one), "the dead letter of the copy")  # type: ignore[misc]
            letter_id = letters(client)[0].letter_id
            again = ("redrive",) if number == "-3" else ("edit", "--set", "n=-4")
            assert call("dlq", *again, letter_id, "--yes", url=client.url).code == 0
        eventually(lambda: is_replaced(client, letter_id), "the dead letter of the last copy")
        (found,) = letters(client)
        shown = call("dlq", "show", found.letter_id, "--json", url=client.url).json()
        assert (shown["fields"]["n"], shown["before_edit"]) == ("-4", {"fields": {"k": "a", "n": "-1"}})
        text = call("dlq", "show", found.letter_id, url=client.url).out
        assert "\nfields before the edit\n  k  a\n  n  -1\n" in text
        refused = call("dlq", "edit", found.letter_id, "--original", "--remove", "m", "--yes", url=client.url)
        assert "no field 'm'" in refused.err
        done = call(
            "dlq", "edit", found.letter_id, "--original", "--set", "n=1", "--by", "bob", "--yes", url=client.url
        )
        assert (done.code, "n changed" in done.out) == (0, True)
        eventually(lambda: not letters(client), "the commit of the copy")
    pairs = client.execute("XREVRANGE", "in", "+", "-", "COUNT", 1)[0][1]
    assert pairs == [REDRIVE_FIELD, b"app.handle", b"k", b"a", b"n", b"1", EDITED_FIELD, b"bob"]


def test_only_the_dead_letter_of_a_copy_has_fields_before_an_edit(client: Client) -> None:
    letter_id = add_dead_letter(client, PAIRS, keys=KEYS)
    refused = call("dlq", "edit", letter_id, "--original", "--yes", url=client.url)
    assert (refused.code, "is not the dead letter of an edited copy" in refused.err) == (2, True)
    assert len(letters(client)) == 1


def test_a_skipped_copy_is_a_dead_letter_that_takes_the_place_of_the_one_before(client: Client) -> None:
    letter_id, new_id = resend(client, "1")
    stream = keyed(client)
    stream.join()
    stream.enqueue_new(count=10, max_pending=10)
    assert skip(client, KEYS, b"ka", error="skipped by ann") == new_id
    assert is_replaced(client, letter_id)
    (found,) = letters(client)
    assert (found.reason, list(found.pairs)) == ("skipped", [*PAIRS[:3], b"1", EDITED_FIELD, b"ann"])
    assert client.execute("EXISTS", KEYS.resent) == 0


def test_a_purged_dead_letter_does_not_come_back_and_its_copy_goes_on(client: Client) -> None:
    for number in ("1", "-2"):
        letter_id, _ = resend(client, number)
        assert call("dlq", "purge", letter_id, "--yes", url=client.url).code == 0
    with working(client, handler_of(lists=False, into="out")):
        eventually(lambda: len(letters(client)) == 1 and client.execute("XLEN", "out") == 1, "the end of both copies")
    assert letters(client)[0].pairs_before_edit is None
    assert client.execute("EXISTS", KEYS.resent) == 0


def test_a_forgotten_handler_keeps_which_copies_are_under_way_as_long_as_its_dead_letters(client: Client) -> None:
    resend(client, "1")
    Forgetting(client, "app", None, dead_letters=False).remove()
    assert client.execute("EXISTS", KEYS.resent, KEYS.dead_letters) == 2
    Forgetting(client, "app", None, dead_letters=True).remove()
    assert client.execute("EXISTS", KEYS.resent, KEYS.dead_letters) == 0


# --- Deaths ---


def keyed(client: Client, name: str = "w1") -> KeyedStream:
    def queue_of(entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
        return queue_of_key(b"a", entry_id)

    return KeyedStream(client, "in", queue_of=queue_of, app="app", handler="handle", consumer=name)


def commit_by_entry(client: Client, name: str) -> Any:
    """Read the copy, or claim it from the worker before, and commit it."""
    stream = ReliableStream(client, "in", app="app", handler="handle", consumer=name)
    stream.join()
    for delivery in [*stream.fetch(count=10), *stream.claim_idle()]:
        effects = stream.effects_of(delivery)
        stream.commit([effects])


def commit_by_key(client: Client, name: str) -> Any:
    """Lease the key of the copy, once the lease of the worker before has ended, and commit it."""
    stream = keyed(client, name)
    stream.join()
    stream.enqueue_new(count=10, max_pending=10)
    client.execute("ZINTERSTORE", KEYS.leases, 1, KEYS.leases, "WEIGHTS", 0)  # the one of a dead worker is over
    for lease in stream.lease_keys(queues=1, entries=10, run=10, lease_ms=60_000, now_ms=0).leases:
        stream.commit([stream.key_effects_of(lease, lease.entries)])


@pytest.mark.faults
@pytest.mark.parametrize("side", ["before", "after"])
def test_an_edit_that_dies_has_added_its_copy_and_marked_the_dead_letter_or_neither(
    millstream_server: EmbeddedServer, client: Client, side: Side
) -> None:
    letter_id = add_dead_letter(client, PAIRS, keys=KEYS)
    words = ("dlq", "edit", letter_id, "--set", "n=1", "--yes")
    with Proxy(millstream_server.port) as proxy:
        cut(proxy, client, side, Script("producer/redrive"))
        assert call(*words, url=proxy.url).code == 3
    assert [one.letter_id for one in letters(client)] == [letter_id]
    added = client.execute("XLEN", "in")
    assert added == (side == "after")
    assert call(*words, url=client.url).code == added, "the second time it is refused, if the first copy is under way"
    assert (client.execute("XLEN", "in"), len(letters(client))) == (1, 1)


def cut(proxy: Proxy, client: Client, side: Side, script: Script) -> None:
    """Lose the connection before the next call of a script is forwarded, or before its reply is."""
    with suppress(MillstreamError):  # without keys it does nothing, and from then on the server has it
        client.script(script, ("x",), ())
    (proxy.cut_before if side == "before" else proxy.cut_after)("EVALSHA", containing=script.sha)


@pytest.mark.faults
@pytest.mark.parametrize("commit", [commit_by_entry, commit_by_key])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_worker_that_dies_at_the_commit_of_a_copy_leaves_the_dead_letter_or_the_commit(
    millstream_server: EmbeddedServer, client: Client, side: Side, commit: Callable[[Client, str], Any]
) -> None:
    letter_id, _ = resend(client, "1")
    with Proxy(millstream_server.port) as proxy, Client(proxy.url) as dying:
        cut(proxy, client, side, COMMIT)
        with pytest.raises(Unavailable):
            commit(dying, "w1")
    assert is_committed(client) == (side == "after")
    assert [one.letter_id for one in letters(client)] == ([] if is_committed(client) else [letter_id])

    def is_finished() -> bool:
        commit(client, "w2")
        return is_committed(client)

    eventually(is_finished, "another worker to finish it")
    assert (letters(client), client.execute("EXISTS", KEYS.resent)) == ([], 0)


def is_committed(client: Client) -> bool:
    return bool(client.execute("HGET", KEYS.meta, "committed") == b"1")


def test_a_refused_commit_of_a_copy_leaves_its_dead_letter(client: Client) -> None:
    letter_id, _ = resend(client, "1")
    first, second = (ReliableStream(client, "in", app="app", handler="handle", consumer=name) for name in ("w1", "w2"))
    first.join()
    (delivery,) = first.fetch(count=10)
    second.join()
    (claimed,) = second.claim_idle()
    assert first.commit([first.effects_of(delivery)]) != []
    assert [one.letter_id for one in letters(client)] == [letter_id]
    assert second.ack(claimed) == []
    assert letters(client) == []


@pytest.mark.parametrize("right", ["xdel", "xrange", "hdel"])
def test_a_worker_without_a_right_that_the_commit_of_a_copy_needs_writes_nothing(
    millstream_fresh_server: EmbeddedServer, right: str
) -> None:
    with Client(millstream_fresh_server.url) as client, limited(client, right) as worker:
        letter_id, _ = resend(client, "1")
        stream = ReliableStream(client, "in", app="app", handler="handle", consumer="w", into="out")
        stream.join()
        (delivery,) = stream.fetch(count=10)
        effects = stream.effects_of(delivery)
        effects.add_outputs([pack_output({"n": 1})])
        store = CommitStore(worker, app="app", handler="handle", into="out", consumer="w")
        with pytest.raises(AccessDenied, match=f"(?i){right}"):
            store.with_token(stream.token).commit({"in": [effects]})
        assert (client.execute("EXISTS", "out"), is_committed(client)) == (0, False)
        assert [one.letter_id for one in letters(client)] == [letter_id]
        client.execute("RENAME", KEYS.resent, "kept")
        client.execute("SET", KEYS.resent, "another program's")
        with pytest.raises(WrongType, match="resent"):
            stream.commit([effects])
        assert (client.execute("EXISTS", "out"), is_committed(client)) == (0, False)
        client.execute("RENAME", "kept", KEYS.resent)
        assert stream.commit([effects]) == []
        assert (client.execute("XLEN", "out"), letters(client)) == (1, [])


def limited(client: Client, right: str) -> Client:
    """A client that may do everything but this."""
    client.execute("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all", f"-{right}")
    return Client(client.url.replace("redis://", "redis://limited:secret@"))


@pytest.mark.parametrize("right", ["hset", "hdel", "xdel"])
def test_an_operator_without_a_right_that_an_edit_or_a_skip_needs_changes_nothing(
    millstream_fresh_server: EmbeddedServer, right: str
) -> None:
    with Client(millstream_fresh_server.url) as client, limited(client, right) as operator:
        letter_id = add_dead_letter(client, PAIRS, keys=KEYS)
        (ref,) = DeadLetterQueue(client).select(DeadLetterFilter())
        with pytest.raises(AccessDenied, match=f"(?i){right}"):
            DeadLetterQueue(operator).redrive_edited(ref, PAIRS, by="ann")
        assert client.execute("EXISTS", "in", KEYS.resent) == 0
        if right == "xdel":
            assert DeadLetterQueue(client).redrive_edited(ref, PAIRS, by="ann").new_id
            stream = keyed(client)
            stream.join()
            stream.enqueue_new(count=10, max_pending=10)
            with pytest.raises(AccessDenied, match=r"(?i)xdel"):
                skip(operator, KEYS, b"ka", error="skipped by ann")
        assert [one.letter_id for one in letters(client)] == [letter_id]


def test_a_batch_takes_along_the_dead_letters_of_all_its_copies(client: Client) -> None:
    for number in ("1", "2", "3"):
        resend(client, number)
    stream = ReliableStream(client, "in", app="app", handler="handle", consumer="w1")
    stream.join()
    found = stream.fetch(count=10)
    assert (len(found), stream.commit([stream.effects_of(*found)])) == (3, [])
    assert (letters(client), client.execute("EXISTS", KEYS.resent)) == ([], 0)


# --- Partitions ---


@pytest.mark.parametrize("dies_at", [None, "before", "after", "XDEL", "HDEL"])
def test_the_dead_letter_of_a_copy_that_is_forwarded_goes_along_wherever_that_dies(
    millstream_server: EmbeddedServer, client: Client, dies_at: str | None
) -> None:
    old_layout = Partitions(client, BASE).create(2)
    key = moved_key(old_layout, 4)
    old = keys_of(old_layout, old_layout.partition_of(key.encode()))
    _, new_id = resend(client, "1", old, [b"k", key.encode(), b"n", b"-1"])
    layout = Partitions(client, BASE).grow(4)
    new = keys_of(layout, layout.partition_of(key.encode()))
    (pairs,) = [pairs for _, pairs in client.execute("XRANGE", old.stream, new_id, new_id)]
    with Proxy(millstream_server.port) as proxy, Client(proxy.url) as dying:
        if dies_at in ("before", "after"):
            cut(proxy, client, "before" if dies_at == "before" else "after", FORWARD_ENTRY)
        elif dies_at is not None:
            proxy.cut_before(dies_at)
        with suppress(Unavailable):
            forward_entry(dying, BASE, old, key.encode(), new_id.encode(), pairs)
            assert dies_at is None
    assert letters(client, old) or letters(client, new)
    assert forward_entry(client, BASE, old, key.encode(), new_id.encode(), pairs)
    ((copy_id, copied),) = client.execute("XRANGE", new.stream, "-", "+")
    assert copied == pairs
    assert letters(client, old) == []
    (entry,) = DeadLetterQueue(client).find(DeadLetterFilter(app="app"))
    assert (entry.keys, entry.copy_id, entry.reason) == (new, copy_id.decode(), "failed")
    assert entry.letter
    assert list(entry.letter.pairs) == [b"k", key.encode(), b"n", b"-1"]
    assert client.execute("EXISTS", old.resent) == 0
