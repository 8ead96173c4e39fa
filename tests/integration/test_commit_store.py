"""The commit store: of two executions of a message at most one commits, in stream order, whole or not at all."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millstream.delivery.commit_store import ENTRY_PREFIX, KEY_PREFIX, CommitStore
from millstream.delivery.effects import Effects
from millstream.errors import AccessDenied, CommandFailed, OutOfMemory, StaleOwner, WrongType
from millstream.handlers.encoding import MAX_ITEMS, encode_output, pack_output
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.resp import Command, Reply, ReplySize
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.keys, pytest.mark.spark]

STREAM = "orders"
KEYS = HandlerKeys("app", "handler", STREAM)


def make_store(client: Client, token: int = 1, **options: object) -> CommitStore:
    return CommitStore(client, app="app", handler="handler", token=token, into="out", **options)  # type: ignore[arg-type]


def unit(
    first: str,
    last: str = "",
    *,
    expected: str = "",
    key: bytes = b"k",
    outputs: Iterable[tuple[str | bytes, str | bytes]] = (),
    **rest: object,
) -> Effects:
    last = last or first
    return Effects(
        KEY_PREFIX + key,
        expected.encode(),
        state_field=key,
        first_id=first,
        last_id=last,
        message_count=1,
        outputs=[pack_output({name: value}) for name, value in outputs],
        **rest,  # type: ignore[arg-type]
    )


def outputs(client: Client) -> list[list[bytes]]:
    return [fields for _, fields in client.execute("XRANGE", "out", "-", "+")]


def test_a_commit_writes_key_offset_state_outputs_and_dead_letters_in_one_step(client: Client) -> None:
    store = make_store(client)
    whole = unit("5-0", "6-0", state=b"\x81", outputs=[("a", "1"), ("b", "2")], dead_letters=[("id", "6-0")])
    assert store.commit({STREAM: [whole]}) == []
    assert outputs(client) == [[b"a", b"1"], [b"b", b"2"]]
    assert [fields for _, fields in client.execute("XRANGE", KEYS.dead_letters, "-", "+")] == [[b"id", b"6-0"]]
    found = store.load({STREAM: ([KEY_PREFIX + b"k"], [b"k"])})
    assert found == {STREAM: {KEY_PREFIX + b"k": b"6-0", b"sk": b"\x81"}}


@pytest.mark.parametrize("into_maxlen", [None, 1_000])
def test_outputs_with_any_number_of_fields_are_written_whole(client: Client, into_maxlen: int | None) -> None:
    wanted = [{f"name{at}": "x" * at for at in range(fields)} for fields in (1, 7, 8, 300, MAX_ITEMS // 2)]
    whole = unit("5-0")
    whole.add_outputs([pack_output(one) for one in wanted])
    assert make_store(client, into_maxlen=into_maxlen).commit({STREAM: [whole]}) == []
    assert outputs(client) == [encode_output(one) for one in wanted]


def test_repeating_a_commit_whose_reply_was_lost_is_refused_and_writes_nothing(client: Client) -> None:
    store = make_store(client)
    again = unit("5-0", outputs=[("a", "1")])
    assert store.commit({STREAM: [again]}) == []
    assert store.commit({STREAM: [again]}) == [again]
    assert outputs(client) == [[b"a", b"1"]]


def test_one_of_two_executions_that_loaded_the_same_key_offset_commits(client: Client) -> None:
    store = make_store(client)
    ours, twins = unit("5-0", outputs=[("by", "us")]), unit("5-0", outputs=[("by", "twin")])
    assert store.commit({STREAM: [ours]}) == []
    assert store.commit({STREAM: [twins]}) == [twins]
    assert outputs(client) == [[b"by", b"us"]]


def test_an_entry_at_or_below_the_committed_offset_is_refused_even_without_its_key_offset(client: Client) -> None:
    store = make_store(client)
    late = unit("5-9", outputs=[("a", "1")])
    assert store.commit({STREAM: [unit("5-9")]}) == []
    store.advance_committed({STREAM: EntryId(5, 9)})
    assert client.execute("EXISTS", KEYS.offsets) == 0
    assert store.commit({STREAM: [late]}) == [late]
    assert outputs(client) == []


@pytest.mark.parametrize(
    ("committed_id", "later"),
    [("5-9", "5-10"), ("99-0", "100-0"), ("7-18446744073709551614", "7-18446744073709551615")],
)
def test_ids_are_ordered_as_numbers_not_as_text(client: Client, committed_id: str, later: str) -> None:
    store = make_store(client)
    store.advance_committed({STREAM: EntryId.parse(committed_id)})
    beyond, below = unit(later), unit(committed_id)
    assert store.commit({STREAM: [below]}) == [below]
    assert store.commit({STREAM: [beyond]}) == []
    store.advance_committed({STREAM: EntryId.parse(later)})
    store.advance_committed({STREAM: EntryId.parse(committed_id)})
    assert store.committed_ids([STREAM]) == {STREAM: EntryId.parse(later)}


def test_an_older_run_is_refused_by_commit_advance_and_begin_with_a_clear_error(client: Client) -> None:
    old, new = make_store(client, token=100), make_store(client, token=200)
    old.begin_run([STREAM])
    new.begin_run([STREAM])
    steps: list[Callable[[], object]] = [
        lambda: old.commit({STREAM: [unit("5-0", outputs=[("a", "1")])]}),
        lambda: old.advance_committed({STREAM: EntryId(5, 0)}),
        lambda: old.begin_run([STREAM]),
    ]
    for step in steps:
        with pytest.raises(StaleOwner, match=r"a newer run of app\.handler has taken over"):
            step()
    assert outputs(client) == []
    assert new.committed_ids([STREAM]) == {}
    assert new.commit({STREAM: [unit("5-0")]}) == []


def test_a_new_token_is_greater_than_the_epoch_of_a_run_whose_clock_ran_ahead(client: Client) -> None:
    ahead = 9_000_000_000_000_000
    make_store(client, token=ahead).begin_run([STREAM])
    assert make_store(client).new_token([STREAM, "other"]) == ahead + 1


def test_repeating_an_advance_does_not_drop_the_key_offsets_of_the_next_batch(client: Client) -> None:
    store = make_store(client)
    store.advance_committed({STREAM: EntryId(5, 0)})
    store.commit({STREAM: [unit("6-0")]})
    store.advance_committed({STREAM: EntryId(5, 0)})
    assert store.load({STREAM: ([KEY_PREFIX + b"k"], [])}) == {STREAM: {KEY_PREFIX + b"k": b"6-0"}}


def test_key_offsets_above_a_smaller_batch_are_kept_until_the_committed_offset_passes_them(
    client: Client,
) -> None:
    store = make_store(client)
    store.commit({STREAM: [unit("5-0", key=b"a"), unit("9-0", key=b"b")]})
    store.advance_committed({STREAM: EntryId(6, 0)})
    again = unit("9-0", key=b"b", outputs=[("n", "9")])
    assert store.commit({STREAM: [again]}) == [again]
    assert store.commit({STREAM: [unit("7-0", expected="5-0", key=b"a")]}) == []
    store.advance_committed({STREAM: EntryId(9, 0)})
    assert client.execute("EXISTS", KEYS.offsets) == 0
    assert outputs(client) == []


def test_a_refused_unit_does_not_delay_the_others_of_its_call(client: Client) -> None:
    store = make_store(client)
    store.commit({STREAM: [unit("5-0", key=b"a")]})
    refused, accepted = (
        unit("5-0", key=b"a", outputs=[("n", "0")]),
        unit("5-1", key=b"b", outputs=[("n", "1")]),
    )
    assert store.commit({STREAM: [refused, accepted]}) == [refused]
    assert outputs(client) == [[b"n", b"1"]]


def test_an_output_stream_of_the_wrong_type_fails_the_whole_step_before_anything_is_written(
    client: Client,
) -> None:
    client.execute("SET", "out", "text")
    with pytest.raises(WrongType):
        make_store(client).commit({STREAM: [unit("5-0", state=b"\x81", outputs=[("a", "1")])]})
    assert client.execute("EXISTS", KEYS.meta, KEYS.offsets, KEYS.state) == 0


def test_a_commit_at_maxmemory_is_refused_whole_and_succeeds_once_there_is_room(client: Client) -> None:
    store = make_store(client)
    big = unit("5-0", state=b"\x81", outputs=[("a", "x" * 1000)])
    client.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(OutOfMemory, match="maxmemory"):
            store.commit({STREAM: [big]})
    finally:
        client.execute("CONFIG", "SET", "maxmemory", "0")
    assert client.execute("EXISTS", KEYS.meta, KEYS.offsets, KEYS.state, "out") == 0
    assert store.commit({STREAM: [big]}) == []


def test_scripts_are_loaded_again_after_the_server_has_forgotten_them(client: Client) -> None:
    store = make_store(client)
    store.commit({STREAM: [unit("5-0")]})
    client.execute("SCRIPT", "FLUSH")
    assert store.commit({STREAM: [unit("6-0", expected="5-0")]}) == []


def test_state_that_is_emptied_is_removed_and_outputs_are_trimmed_to_their_length(client: Client) -> None:
    store = make_store(client, into_maxlen=100)
    store.commit({STREAM: [unit("5-0", state=b"\x81")]})
    many = unit("6-0", expected="5-0", state=b"", outputs=[("n", str(n)) for n in range(2000)])
    store.commit({STREAM: [many]})
    assert client.execute("HLEN", KEYS.state) == 0
    assert 100 <= client.execute("XLEN", "out") < 400


def test_dropping_the_progress_keeps_the_epoch_so_that_a_run_still_alive_is_refused(client: Client) -> None:
    old = make_store(client, token=100)
    old.begin_run([STREAM])
    old.commit({STREAM: [unit("5-0", state=b"\x81")]})
    new = make_store(client, token=200)
    with pytest.raises(StaleOwner):
        new.drop_progress([STREAM])
    new.begin_run([STREAM])
    new.drop_progress([STREAM])
    assert client.execute("EXISTS", KEYS.offsets, KEYS.state) == 0
    with pytest.raises(StaleOwner):
        old.commit({STREAM: [unit("6-0")]})


def test_eight_threads_committing_the_same_messages_apply_each_once_and_in_order(millstream_url: str) -> None:
    ids = [f"{n}-0" for n in range(1, 201)]
    gate = threading.Barrier(8)

    def execute_all() -> None:
        with Client(millstream_url) as own:
            store = make_store(own)
            gate.wait()
            done = EntryId(0, 0)
            while done < EntryId(200, 0):
                mark = store.load({STREAM: ([KEY_PREFIX + b"k"], [])})[STREAM].get(KEY_PREFIX + b"k", b"")
                done = EntryId.parse(mark) if mark else EntryId(0, 0)
                if done < EntryId(200, 0):
                    following = ids[done.ms]
                    store.commit({STREAM: [unit(following, expected=mark.decode(), outputs=[("id", following)])]})

    threads = [threading.Thread(target=execute_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAIL_SAFE_S)
    with Client(millstream_url) as reader:
        assert [fields[1].decode() for fields in outputs(reader)] == ids


class CommitStoreMachine(RuleBasedStateMachine):
    """Executions load, pause and commit as they like; the effects are those of one execution, in order."""

    client: Client
    last = 12

    @initialize()
    def empty(self) -> None:
        self.client.execute("FLUSHALL")
        self.loaded: list[tuple[CommitStore, bytes, int]] = []
        self.committed = 0
        self.committed_id = 0
        self.token = 1

    def store(self) -> CommitStore:
        return make_store(self.client, token=self.token)

    @rule()
    def an_execution_loads(self) -> None:
        store = self.store()
        mark = store.load({STREAM: ([KEY_PREFIX + b"k"], [])})[STREAM].get(KEY_PREFIX + b"k", b"")
        done = EntryId.parse(mark).ms if mark else self.committed_id
        self.loaded.append((store, mark, done))

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), length=st.integers(1, 3), repeat=st.booleans())
    def an_execution_commits(self, data: st.DataObject, length: int, repeat: bool) -> None:
        store, mark, done = data.draw(st.sampled_from(self.loaded))
        end = min(done + length, self.last)
        if end == done:
            return
        effects = [("n", str(n)) for n in range(done + 1, end + 1)]
        whole = unit(f"{done + 1}-0", f"{end}-0", expected=mark.decode(), outputs=effects)
        for _ in range(1 + repeat):
            try:
                refused = store.commit({STREAM: [whole]})
            except StaleOwner:
                return
            if not refused:
                self.committed = end

    @rule()
    def a_new_run_begins(self) -> None:
        self.token += 1
        self.store().begin_run([STREAM])

    @rule()
    def the_batch_ends(self) -> None:
        if self.committed > self.committed_id:
            self.store().advance_committed({STREAM: EntryId(self.committed, 0)})
            self.committed_id = self.committed

    @invariant()
    def effects_are_those_of_one_execution_in_order(self) -> None:
        if hasattr(self, "committed"):
            assert [int(fields[1]) for fields in outputs(self.client)] == list(range(1, self.committed + 1))


def test_no_interleaving_of_executions_runs_and_batches_loses_doubles_or_reorders(client: Client) -> None:
    CommitStoreMachine.client = client
    check = CommitStoreMachine.TestCase
    check.settings = settings(max_examples=40, stateful_step_count=30)
    check().runTest()


@given(key=st.binary(max_size=40), state=st.binary(min_size=1, max_size=200), value=st.binary(max_size=200))
@settings(max_examples=40)
def test_keys_states_and_outputs_are_byte_exact(client: Client, key: bytes, state: bytes, value: bytes) -> None:
    client.execute("FLUSHALL")
    store = make_store(client)
    assert store.commit({STREAM: [unit("5-0", key=key, state=state, outputs=[(b"\x00f", value)])]}) == []
    assert store.load({STREAM: ([KEY_PREFIX + key], [key])})[STREAM][b"s" + key] == state
    assert outputs(client) == [[b"\x00f", value]]


def test_an_unkeyed_entry_is_remembered_by_its_id_within_the_batch(client: Client) -> None:
    store = make_store(client)
    single = Effects(
        ENTRY_PREFIX + b"5-0", b"", first_id="5-0", last_id="5-0", message_count=1, outputs=[pack_output({"a": 1})]
    )
    assert store.commit({STREAM: [single]}) == []
    assert store.commit({STREAM: [single]}) == [single]
    assert store.crash_count(STREAM, "6-0") == 0
    for _ in range(2):
        store.set_crash_count(STREAM, "6-0", 2)  # repeated, as if the first reply was lost
    assert store.crash_count(STREAM, "6-0") == 2
    assert store.begin_run([STREAM])[STREAM].suspects == 1
    store.set_crash_count(STREAM, "6-0", 0)
    assert store.begin_run([STREAM])[STREAM].suspects == 0, "the task survived it"


def test_a_commit_between_the_reads_of_a_load_is_detected_so_that_no_stale_state_is_committed(
    millstream_url: str,
) -> None:
    class Interleaved(Client):
        """Lets the twin commit after the first command of each pipeline, as another connection may."""

        def pipeline(self, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
            replies: list[Reply] = []
            for command in commands:
                replies += super().pipeline([command])
                twin.commit({STREAM: [unit("5-0", state=b"\x81twin")]})
            return replies

    with Client(millstream_url) as other, Interleaved(millstream_url) as client:
        twin = make_store(other)
        found = make_store(client).load({STREAM: ([KEY_PREFIX + b"k"], [b"k"])})[STREAM]
        mark = found.get(KEY_PREFIX + b"k", b"").decode()
        ours = unit("6-0" if mark else "5-0", expected=mark, state=found.get(b"sk", b"") + b"ours")
        accepted = make_store(other).commit({STREAM: [ours]}) == []
        state = other.execute("HGET", KEYS.state, "k")
    assert state == (b"\x81twinours" if accepted else b"\x81twin")


@pytest.fixture
def limited(client: Client, millstream_server: EmbeddedServer) -> Iterator[Callable[[str], Client]]:
    """Makes a client of a user with all rights but those named."""
    opened: list[Client] = []

    def make(rights: str) -> Client:
        client.execute("ACL", "SETUSER", "clerk", "reset", "on", ">pw", "~*", "&*", "+@all", *rights.split())
        opened.append(Client(millstream_server.url.replace("redis://", "redis://clerk:pw@")))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
    client.execute("ACL", "DELUSER", "clerk")


@pytest.mark.parametrize("rights", ["-xadd", "-hset", "-hdel", "-hincrby", "resetkeys ~millstream:* ~orders"])
def test_a_run_without_the_rights_to_commit_is_refused_when_it_begins(
    client: Client, limited: Callable[[str], Client], rights: str
) -> None:
    with pytest.raises(AccessDenied, match="may not"):
        make_store(limited(rights)).begin_run([STREAM])
    assert client.execute("EXISTS", KEYS.meta, "out", KEYS.dead_letters, KEYS.offsets) == 0
    make_store(limited("")).begin_run([STREAM])


def test_a_write_that_redis_refuses_stores_no_key_offset_so_that_the_retry_commits(
    client: Client, limited: Callable[[str], Client]
) -> None:
    mine = make_store(limited("-xadd"))
    letter = unit("5-0", key=b"dies", dead_letters=[("id", "5-0")])
    for refused in (unit("5-0", state=b"\x81", outputs=[("a", "1")]), letter):
        with pytest.raises(AccessDenied):
            mine.commit({STREAM: [refused]})
    assert client.execute("EXISTS", KEYS.offsets, KEYS.state, KEYS.meta) == 0
    again = unit("5-0", state=b"\x81", outputs=[("a", "1")])
    assert make_store(client).commit({STREAM: [again, letter]}) == []
    assert outputs(client) == [[b"a", b"1"]]


def test_units_committed_before_a_refused_write_keep_their_key_offsets_past_a_smaller_batch(client: Client) -> None:
    """Their key offsets lie under `top` although the call as a whole failed."""
    client.execute("XADD", "out", f"{2**64 - 1}-{2**64 - 2}", "a", "0")
    store = make_store(client)
    first, second = unit("8-0", key=b"x", outputs=[("a", "1")]), unit("9-0", key=b"y", outputs=[("a", "2")])
    with pytest.raises(CommandFailed, match="exhausted"):
        store.commit({STREAM: [first, second]})
    store.advance_committed({STREAM: EntryId(7, 0)})
    assert store.load({STREAM: ([KEY_PREFIX + b"x", KEY_PREFIX + b"y"], [])}) == {STREAM: {KEY_PREFIX + b"x": b"8-0"}}
    assert store.commit({STREAM: [first]}) == [first]
