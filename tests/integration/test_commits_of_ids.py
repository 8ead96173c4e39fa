"""Messages without effects, committed by their ids: a chunk that leaves nothing pending before it moves the committed
id, any other one leaves an offset for each entry.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millstream.delivery.commit_store import CommitStore
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import AccessDenied
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys

pytestmark = [pytest.mark.worker]

KEYS = HandlerKeys("app", "handle", "in")
MANY = 100
"""So many ids at once may move the committed id."""


def fill(client: Client, count: int) -> list[bytes]:
    client.pipeline([("XADD", "in", f"{n}-0", "n", n) for n in range(1, count + 1)])
    return [b"%d-0" % n for n in range(1, count + 1)]


def worker(client: Client, name: str = "w1") -> ReliableStream:
    stream = ReliableStream(client, "in", app="app", handler="handle", consumer=name)
    stream.join()
    return stream


def committed_id(client: Client) -> bytes:
    found: bytes = client.execute("HGET", KEYS.meta, "committed_id")
    return found


def offsets(client: Client) -> int:
    return int(client.execute("HLEN", KEYS.offsets))


def pending(client: Client) -> int:
    return int(client.execute("XPENDING", "in", KEYS.group)[0])


def committed(client: Client) -> int:
    return int(client.execute("HGET", KEYS.meta, "committed") or 0)


@contextmanager
def refused(client: Client, command: str) -> Iterator[None]:
    """Redis refuses a command of all users within the block."""
    client.execute("ACL", "SETUSER", "default", f"-{command}")
    try:
        yield
    finally:
        client.execute("ACL", "SETUSER", "default", f"+{command}")


def fetch_beyond(client: Client, mine: ReliableStream, ids: list[bytes]) -> None:
    """An operator skips entries, and sets the group back while the next ones run."""
    client.execute("XGROUP", "SETID", "in", KEYS.group, ids[MANY - 1])
    mine.fetch(count=MANY)
    client.execute("XGROUP", "SETID", "in", KEYS.group, "0")


def test_many_ids_with_nothing_pending_before_them_move_the_committed_id(client: Client) -> None:
    ids = fill(client, MANY + 5)
    mine = worker(client)
    mine.fetch(count=MANY + 5)
    assert mine.commit(ids[:3]) == []
    assert (committed_id(client), offsets(client)) == (b"0-0", 3)
    assert mine.commit(ids[3 : MANY + 3]) == []
    assert (committed_id(client), offsets(client), pending(client)) == (ids[MANY + 2], 0, 2)
    assert mine.commit(ids) == ids[: MANY + 3], "committed before"
    assert (committed(client), pending(client), offsets(client)) == (MANY + 5, 0, 2)


def test_ids_with_an_earlier_one_pending_leave_offsets_and_the_earlier_one_can_be_committed(client: Client) -> None:
    ids = fill(client, 2 * MANY + 1)
    other, mine = worker(client, "other"), worker(client)
    other.fetch(count=1)
    mine.fetch(count=2 * MANY)
    assert mine.commit(ids[1 : MANY + 1]) == []
    assert (committed_id(client), offsets(client)) == (b"0-0", MANY)
    assert mine.commit(ids[1 : MANY + 1]) == ids[1 : MANY + 1], "committed before"
    assert other.commit(ids[:1]) == []
    assert mine.commit(ids[MANY + 1 :]) == []
    assert (committed_id(client), offsets(client), committed(client)) == (ids[-1], 0, 2 * MANY + 1)


def test_ids_do_not_move_the_committed_id_beyond_entries_that_the_group_is_set_back_to(client: Client) -> None:
    """An operator skips entries, changes his mind and sets the group back while entries behind them run."""
    ids = fill(client, 2 * MANY)
    mine = worker(client)
    fetch_beyond(client, mine, ids)
    assert mine.commit(ids[MANY:]) == []
    assert (committed_id(client), offsets(client)) == (b"0-0", MANY)
    mine.fetch(count=MANY)
    assert mine.commit(ids[:MANY]) == []
    assert committed(client) == 2 * MANY


def test_on_a_stream_of_many_groups_only_as_many_ids_move_the_committed_id(client: Client) -> None:
    """It takes a look at all groups, as many as the last checkpoint has counted."""
    ids = fill(client, 4 * MANY)
    mine = worker(client)
    client.pipeline([("XGROUP", "CREATE", "in", f"other-{n}", "0") for n in range(2 * MANY - 1)])
    mine.checkpoint()
    mine.fetch(count=4 * MANY)
    assert mine.commit(ids[: 2 * MANY - 1]) == []
    assert (committed_id(client), offsets(client)) == (b"0-0", 2 * MANY - 1)
    assert mine.commit(ids[2 * MANY - 1 : 3 * MANY]) == []
    assert (committed_id(client), offsets(client)) == (b"0-0", 3 * MANY)
    client.pipeline([("XGROUP", "DESTROY", "in", f"other-{n}") for n in range(2 * MANY - 1)])
    mine.checkpoint()
    assert mine.commit(ids[3 * MANY :]) == []
    assert (committed_id(client), offsets(client), committed(client)) == (ids[-1], 0, 4 * MANY)


def test_a_run_on_spark_begins_after_ids_that_moved_the_committed_id(client: Client) -> None:
    ids = fill(client, MANY + 2)
    mine = worker(client)
    mine.fetch(count=MANY + 2)
    assert mine.commit([*ids[:MANY], ids[-1]]) == []
    store = CommitStore(client, app="app", handler="handle")
    position = store.with_token(store.new_token(["in"])).begin_run(["in"])["in"]
    assert position.committed_id == EntryId(MANY, 0)
    assert store.incomplete("in", [one.decode() for one in ids]) == {ids[MANY].decode()}


def test_ids_whose_acknowledgement_redis_refuses_are_not_counted(client: Client) -> None:
    ids = fill(client, 2 * MANY)
    mine = worker(client)
    mine.fetch(count=2 * MANY)
    for some in (ids[: MANY // 2], ids[:MANY], [ids[0], *ids[2 : 2 * MANY]]):
        with refused(client, "xack"), pytest.raises(AccessDenied):
            mine.commit(some)
        assert (committed(client), offsets(client), pending(client)) == (0, 0, 2 * MANY)
    assert mine.commit(ids) == []
    assert committed(client) == 2 * MANY


def test_incomplete_ids_whose_acknowledgement_redis_refuses_stay_incomplete(client: Client) -> None:
    ids = fill(client, 3)
    mine = worker(client)
    mine.fetch(count=3)
    mine.checkpoint()
    with refused(client, "xack"), pytest.raises(AccessDenied):
        mine.commit(ids)
    assert client.execute("HLEN", KEYS.incomplete) == 3
    assert mine.commit(ids) == []
    assert (client.execute("HLEN", KEYS.incomplete), committed(client)) == (0, 3)


def test_entries_that_were_incomplete_beyond_the_committed_id_are_committed_once(client: Client) -> None:
    """A checkpoint stores those that run while the group is set back; then the group is lost."""
    ids = fill(client, 3 * MANY)
    mine = worker(client)
    fetch_beyond(client, mine, ids)
    mine.checkpoint()
    assert mine.commit(ids[MANY : 2 * MANY]) == []
    mine.fetch(count=3 * MANY)
    assert mine.commit(ids[:MANY]) == []
    assert mine.commit(ids[MANY : 2 * MANY]) == ids[MANY : 2 * MANY], "committed before"
    assert mine.commit(ids[2 * MANY :]) == []
    assert (committed(client), committed_id(client)) == (3 * MANY, ids[-1])
    client.execute("XGROUP", "DESTROY", "in", KEYS.group)
    mine.join()
    again = [one.id for one in mine.claim_idle(count=1_000)]
    assert mine.commit(again) == again
    assert committed(client) == 3 * MANY


@pytest.mark.parametrize("command", ["xinfo|groups", "unlink"])
def test_ids_are_committed_once_while_redis_refuses_what_would_move_the_committed_id(
    client: Client, command: str
) -> None:
    ids = fill(client, 2 * MANY)
    mine = worker(client)
    mine.fetch(count=2 * MANY)
    with refused(client, command):
        assert mine.commit(ids[:MANY]) == []
    assert mine.commit(ids[:MANY]) == ids[:MANY], "committed before"
    assert mine.commit(ids[MANY:]) == []
    assert (committed(client), pending(client), committed_id(client)) == (2 * MANY, 0, ids[-1])
