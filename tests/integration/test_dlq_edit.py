"""A dead letter is resent with other fields: in one step, with the name of its editor, in the order of its key. What
becomes of it when the copy ends is in `test_dlq_copies.py`.
"""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from millstream import App, Message, Retry
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue, DeadLetterRef
from millstream.errors import ConfigError, OutOfMemory
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import EDITED_FIELD, REDRIVE_FIELD
from tests.support.commandline import call
from tests.support.dead_letters import KEYS, add_dead_letter, entries, left
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import working

pytestmark = [pytest.mark.worker]

PAIRS = [b"account", b"ann", b"amount", b"-1", b"raw", b"\xff\n"]
EDIT = ("dlq", "edit", "shop.pay")


def add(client: Client, pairs: Sequence[bytes] = PAIRS) -> str:
    """A dead letter with these fields; its id."""
    return add_dead_letter(client, pairs)


def ref_of(client: Client) -> DeadLetterRef:
    (found,) = DeadLetterQueue(client).select(DeadLetterFilter(app="shop"))
    return found


def test_a_copy_with_other_fields_names_its_editor_and_its_dead_letter_stays(client: Client) -> None:
    letter_id = add(client)
    words = (*EDIT, letter_id, "--set", "amount=10", "--set", "note=a=b", "--remove", "account", "--by", "ann")
    dry = call(*words, "--dry-run", url=client.url)
    assert dry.out == f"dead letter {letter_id} would be redriven: amount changed; note added; account removed\n"
    refusal = call(*words, url=client.url)
    assert (refusal.code, "--yes" in refusal.err) == (2, True)
    assert (left(client), entries(client)) == (1, [])
    done = call(*words, "--yes", "--json", url=client.url).json()
    (new_id,) = [one.decode() for one, _ in client.execute("XRANGE", "orders", "-", "+")]
    assert done == {
        "letter_id": letter_id,
        "handler": "shop.pay",
        "stream": "orders",
        "changed": ["amount"],
        "added": ["note"],
        "removed": ["account"],
        "new_id": new_id,
        "dry_run": False,
    }
    mark = [REDRIVE_FIELD, b"shop.pay"]
    assert entries(client) == [
        [*mark, b"amount", b"10", b"raw", b"\xff\n", b"note", b"a=b", EDITED_FIELD, b"ann"],
    ]
    assert left(client) == 1
    assert call("dlq", "list", "--json", url=client.url).json()["copy_id"] == new_id
    assert call("dlq", "list", url=client.url).out.splitlines()[1].endswith(f"  {new_id}")
    assert f"edited copy  {new_id} is under way" in call("dlq", "show", letter_id, url=client.url).out


def test_a_dead_letter_whose_copy_is_under_way_is_neither_redriven_nor_edited_again(client: Client) -> None:
    letter_id, other = add(client), add(client, [b"n", b"1"])
    new_id = call(*EDIT, letter_id, "--set", "amount=10", "--yes", "--json", url=client.url).json()["new_id"]
    problem = f"letter {letter_id} was not redriven: its edited copy is under way: {new_id}\n"
    again = call(*EDIT, letter_id, "--set", "amount=11", "--yes", url=client.url)
    assert (again.code, again.err) == (1, problem)
    done = call("dlq", "redrive", "--all", "--yes", url=client.url)
    assert (done.code, done.out) == (1, "1 dead letter redriven\n")
    assert problem in done.err
    assert (len(entries(client)), left(client)) == (2, 1)
    assert [one.letter_id for one in DeadLetterQueue(client).find(DeadLetterFilter())] == [letter_id] != [other]


def test_a_dead_letter_whose_copy_is_gone_from_the_stream_is_redriven_again(client: Client) -> None:
    letter_id = add(client)
    new_id = call(*EDIT, letter_id, "--set", "amount=10", "--yes", "--json", url=client.url).json()["new_id"]
    client.execute("XDEL", "orders", new_id)
    assert call("dlq", "list", "--json", url=client.url).json()["copy_id"] is None
    assert call("dlq", "redrive", letter_id, "--yes", url=client.url).code == 0
    assert entries(client) == [[REDRIVE_FIELD, b"shop.pay", *PAIRS]]
    assert (left(client), client.execute("EXISTS", KEYS.resent)) == (0, 0)


def test_the_editor_is_the_user_of_the_command_and_the_last_one_counts(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "bob")
    letter_id = add(client, [*PAIRS, EDITED_FIELD, b"ann"])
    assert call(*EDIT, letter_id, "--set", "amount=10", "--yes", url=client.url).code == 0
    (pairs,) = entries(client)
    assert pairs[-2:] == [EDITED_FIELD, b"bob"]
    assert pairs.count(EDITED_FIELD) == 1


def test_what_cannot_be_edited_is_one_line_and_changes_nothing(client: Client) -> None:
    letter_id = add(client, [b"n", b"1"])
    assert "no field 'm'" in call(*EDIT, letter_id, "--remove", "m", "--yes", url=client.url).err
    assert "at least one field" in call(*EDIT, letter_id, "--remove", "n", "--yes", url=client.url).err
    assert call(*EDIT, letter_id, "--set", "n", "--yes", url=client.url).code == 2
    assert call(*EDIT, "--set", "n=1", "--yes", url=client.url).code == 2
    assert call(*EDIT, "1-1", "--set", "n=1", "--yes", url=client.url).code == 1
    foreign = client.execute("XADD", KEYS.dead_letters, "*", "n", 1).decode()
    assert "is no dead letter" in call(*EDIT, foreign, "--set", "n=1", "--yes", url=client.url).err
    many = [f"--set=f{n}=" for n in range(3_999)]
    refusal = call(*EDIT, letter_id, *many, "--yes", url=client.url)
    assert (refusal.code, "too many for one atomic step" in refusal.err) == (1, True)
    assert (left(client), entries(client)) == (2, [])


def test_of_several_edits_and_redrives_at_once_one_takes_the_dead_letter(client: Client) -> None:
    edited = 0
    for _ in range(10):
        add(client)
        ref, ready = ref_of(client), threading.Barrier(4)
        outcomes: list[Any] = []

        def act(name: str, ref: DeadLetterRef = ref, ready: threading.Barrier = ready) -> None:
            with Client(client.url) as own:
                own.execute("PING")
                ready.wait(FAIL_SAFE_S)
                queue = DeadLetterQueue(own)
                done = queue.redrive_edited(ref, [b"n", b"2"], by=name) if name else next(queue.redrive([ref]))
                outcomes.append(done.new_id)  # noqa: B023 - the threads end within the loop

        threads = [threading.Thread(target=act, args=(name,)) for name in ("ann", "bob", "", "")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(FAIL_SAFE_S)
        assert [one is None for one in sorted(outcomes, key=str)] == [False, True, True, True]
        edited += DeadLetterQueue(client).purge([ref])
    assert len(entries(client)) == 10
    assert sum(EDITED_FIELD in pairs for pairs in entries(client)) == edited


def test_a_full_redis_keeps_the_dead_letter_as_it_was(millstream_fresh_server: EmbeddedServer) -> None:
    with Client(millstream_fresh_server.url) as client:
        add(client)
        ref = ref_of(client)
        client.execute("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(OutOfMemory):
            DeadLetterQueue(client).redrive_edited(ref, [b"n", b"2"], by="ann")
        client.execute("CONFIG", "SET", "maxmemory", 0)
        assert (left(client), entries(client)) == (1, [])
        with pytest.raises(ConfigError, match="at least one field"):
            DeadLetterQueue(client).redrive_edited(ref, [EDITED_FIELD, b"bob"], by="ann")
        assert left(client) == 1


def pay(seen: list[tuple[bytes | None, dict[str, bytes]]]) -> Handler:
    """A handler by account that refuses negative amounts, and notes the key and the fields of each attempt."""
    app = App("shop")

    @app.handler("orders", key="account", name="pay", retry=Retry(attempts=1))
    def handle(message: Message) -> None:
        seen.append((message.key, message.fields))
        if message.fields["amount"].startswith(b"-"):
            raise ValueError("negative")

    return app.handlers["pay"]


def test_the_handler_gets_the_copy_after_the_messages_of_its_new_key_and_sees_the_editor(client: Client) -> None:
    seen: list[tuple[bytes | None, dict[str, bytes]]] = []
    client.execute("XADD", "orders", "*", "account", "ann", "amount", "-1")
    with working(client, pay(seen)):
        eventually(lambda: left(client) == 1, "a dead letter")
        client.execute("XADD", "orders", "*", "account", "bob", "amount", "5")
        queue = DeadLetterQueue(client)
        edited = [b"account", b"bob", b"amount", b"1"]
        assert queue.redrive_edited(ref_of(client), edited, by="ann").new_id
        eventually(lambda: len(seen) == 3, "the copy")
        eventually(lambda: left(client) == 0, "the commit of the copy")
        assert [(key, fields["amount"]) for key, fields in seen] == [(b"ann", b"-1"), (b"bob", b"5"), (b"bob", b"1")]
        assert seen[-1][1]["millstream.edited"] == b"ann"


def test_a_copy_that_fails_again_still_says_that_it_was_edited(client: Client) -> None:
    client.execute("XADD", "orders", "*", "account", "ann", "amount", "-1")
    with working(client, pay([])):
        eventually(lambda: left(client) == 1, "a dead letter")
        ref = ref_of(client)
        DeadLetterQueue(client).redrive_edited(ref, [b"account", b"ann", b"amount", b"-2"], by="ann")
        first = ref.letter_id
        eventually(lambda: ref_of(client).letter_id != first, "another one")
        (entry,) = DeadLetterQueue(client).find(DeadLetterFilter(app="shop"))
        assert entry.letter
        assert list(entry.letter.pairs) == [b"account", b"ann", b"amount", b"-2", EDITED_FIELD, b"ann"]
        assert entry.letter.pairs_before_edit == [b"account", b"ann", b"amount", b"-1"]
