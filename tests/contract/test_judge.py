"""The judge of the contract sees what is wrong: each test does one thing that an engine must not do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from millstream import App, Message, State
from millstream.admin.inspection import state_expiry
from millstream.delivery.commit_store import ENTRY_PREFIX, CommitStore
from millstream.delivery.effects import Effects
from millstream.handlers.dead_letter import DeadLetter
from millstream.handlers.encoding import pack_output
from millstream.handlers.upcasting import encode_state
from millstream.redis_client.client import Client
from millstream.redis_client.pipelining import server_time_ms
from millstream.redis_client.resp import Arg
from millstream.testing.contract import APP, Case, ContractBroken, Letter, entry, entry_id, publish, run_cases, verify

pytestmark = [pytest.mark.worker, pytest.mark.keys, pytest.mark.spark]


def handle(message: Message) -> None:
    """Is never run here."""


CASE = Case(
    name="case",
    promise="a promise",
    function=handle,
    entries=[entry(n=0), entry(n=1), entry(n=2)],
    outputs=[{"k": "a", "n": 0}, {"k": "a", "n": 1}],
    order_by="k",
    letters=[Letter(entry=2, reason="rejected", says="no")],
)


@pytest.fixture
def client(millstream_url: str) -> Iterator[Client]:
    with Client(millstream_url) as connected:
        publish(connected, CASE)
        yield connected


def unit(number: int, *, outputs: Sequence[bytes] = (), dead: Sequence[Sequence[Arg]] = ()) -> Effects:
    one_id = entry_id(number)
    found = Effects(ENTRY_PREFIX + one_id.encode(), b"", first_id=one_id, last_id=one_id, message_count=1)
    found.outputs, found.dead_letters = outputs, dead
    return found


def letter(**changes: Any) -> list[Sequence[Arg]]:
    values: dict[str, Any] = {"pairs": [b"n", b"2"], "attempts": 1, "reason": "rejected", "error": "no", **changes}
    found = DeadLetter(stream=CASE.stream, id=entry_id(2), key=None, app=APP, handler=CASE.name, time_ms=0, **values)
    return [found.items()]


FIRST = pack_output({"k": "a", "n": 0})
SECOND = pack_output({"k": "a", "n": 1})


def commit(client: Client, *units: Effects) -> None:
    CommitStore(client, app=APP, handler=CASE.name, into=CASE.into).commit({CASE.stream: units})


def test_verify_accepts_a_correct_result(client: Client) -> None:
    commit(client, unit(0, outputs=[FIRST]), unit(1, outputs=[SECOND]), unit(2, dead=letter()))
    verify(client, CASE)


@pytest.mark.parametrize(
    ("units", "complaint"),
    [
        (
            [unit(0, outputs=[FIRST, FIRST]), unit(1, outputs=[SECOND]), unit(2, dead=letter())],
            "unexpected or repeated outputs",
        ),
        ([unit(0, outputs=[FIRST]), unit(1), unit(2, dead=letter())], "it lacks outputs"),
        ([unit(1, outputs=[SECOND]), unit(0, outputs=[FIRST]), unit(2, dead=letter())], "out of order"),
        ([unit(0, outputs=[FIRST]), unit(1, outputs=[SECOND]), unit(2)], "is not a dead letter"),
        ([unit(0, outputs=[FIRST]), unit(1, outputs=[SECOND])], "2 of 3 entries are committed"),
        *(
            ([unit(0, outputs=[FIRST]), unit(1, outputs=[SECOND]), unit(2, dead=letter(**change))], complaint)
            for change, complaint in (
                ({"attempts": 2}, "the attempts of dead letter .* is 2, not 1"),
                ({"pairs": [b"n", b"x"]}, "the fields of dead letter"),
                ({"reason": "failed"}, "the reason of dead letter"),
                ({"error": "why"}, "without 'no'"),
            )
        ),
    ],
)
def test_verify_names_each_violation(client: Client, units: list[Effects], complaint: str) -> None:
    commit(client, *units)
    with pytest.raises(ContractBroken, match=f"case: a promise. But .*{complaint}"):
        verify(client, CASE)


def test_verify_names_leftover_pending_entries_and_crash_counts(client: Client) -> None:
    commit(client, unit(0, outputs=[FIRST]), unit(1, outputs=[SECOND]), unit(2, dead=letter()))
    client.execute("HSET", CASE.keys.crashes, entry_id(1), 1)
    client.execute("XGROUP", "CREATE", CASE.stream, CASE.keys.group, 0)
    client.execute("XREADGROUP", "GROUP", CASE.keys.group, "w", "STREAMS", CASE.stream, ">")
    with pytest.raises(ContractBroken, match="3 entries are pending; crash counts are left"):
        verify(client, CASE)


def test_verify_names_entries_of_the_stream_that_are_neither_published_nor_set_by_timers(client: Client) -> None:
    commit(client, unit(0, outputs=[FIRST]), unit(1, outputs=[SECOND]), unit(2, dead=letter()))
    client.execute("XADD", CASE.stream, "*", "n", 3)
    with pytest.raises(ContractBroken, match="its stream has 4 entries, not 3"):
        verify(client, CASE)


HOUR_MS = 3_600_000
EXPIRING = replace(
    CASE,
    options={"state_ttl_ms": HOUR_MS},
    outputs=[{"k": "a", "n": n} for n in range(3)],
    letters=(),
    last_changes={b"a": 1},
)


def commit_states(client: Client, at_ms: Sequence[int], *, ttl_ms: int | None = HOUR_MS, changing: bool = True) -> None:
    """Commit the three messages of key `a`, the last with its state; the ids of the outputs are set to `at_ms`.

    `at_ms`: so many ms after the state was set. The clock of the server could advance between the commands of a commit.
    """
    units = unit(0), unit(1), unit(2)
    if changing:
        units[-1].state_field, units[-1].state = b"a", encode_state(State(n=2))
    store = CommitStore(client, app=APP, handler=CASE.name, into=CASE.into, state_ttl_ms=ttl_ms)
    store.commit({CASE.stream: units})
    expires_ms = state_expiry(client, CASE.keys, b"a")
    set_ms = server_time_ms(client) if expires_ms is None else expires_ms - HOUR_MS
    for n, after_ms in enumerate(at_ms):
        client.execute("XADD", CASE.into, f"{set_ms + after_ms}-{n}", "k", "a", "n", n)


@pytest.mark.parametrize("at_ms", [(-1, 0, 1), (-1, -1, 1), (-1, 1, 1)])
def test_verify_accepts_a_state_that_expires_so_long_after_its_last_change(
    client: Client, at_ms: Sequence[int]
) -> None:
    commit_states(client, at_ms)
    verify(client, EXPIRING)


@pytest.mark.parametrize("at_ms", [(0, 1, 2), (-2, -1, 0)], ids=["not renewed", "renewed without a change"])
def test_verify_names_a_state_that_expires_at_another_time(client: Client, at_ms: Sequence[int]) -> None:
    commit_states(client, at_ms)
    with pytest.raises(ContractBroken, match="the state of key b'a' does not expire so long after output 1"):
        verify(client, EXPIRING)


@pytest.mark.parametrize(("ttl_ms", "changing"), [(None, True), (HOUR_MS, False)], ids=["for ever", "gone"])
def test_verify_names_a_state_that_does_not_expire(client: Client, ttl_ms: int | None, changing: bool) -> None:
    commit_states(client, (-1, 0, 1), ttl_ms=ttl_ms, changing=changing)
    with pytest.raises(ContractBroken, match="the state of key b'a' does not expire, or is gone"):
        verify(client, EXPIRING)


def test_an_engine_that_does_nothing_is_reported_with_its_progress(millstream_url: str) -> None:
    def idle(app: App, url: str, until: Callable[[], bool]) -> None:
        while not until():
            pass

    with pytest.raises(ContractBroken, match=r"incomplete after 0 s: case 0/3"):
        run_cases(idle, millstream_url, [CASE], within_s=0.1)


def test_an_engine_that_runs_no_schedule_is_reported_although_it_has_committed_all_entries(
    millstream_url: str,
) -> None:
    def without_schedules(app: App, url: str, until: Callable[[], bool]) -> None:
        with Client(url) as client:
            commit(client, unit(0), unit(1), unit(2))
        while not until():
            pass

    case = replace(CASE, schedule=lambda: {"n": 3}, firings=2, missed="skip")
    with pytest.raises(ContractBroken, match=r"incomplete after 0 s: case 3/3 and a firing is due"):
        run_cases(without_schedules, millstream_url, [case], within_s=0.1)
