"""The protocol of key queues holds in every order of steps, each of its checks is needed, and the memo's protocol does not hold."""

import pytest

from tests.support.protocol_model import KeyQueueProtocol, Memo, explore

pytestmark = [pytest.mark.keys, pytest.mark.spark]

OVERLAP = "two workers run one key"


@pytest.mark.parametrize(
    "model",
    [
        KeyQueueProtocol(messages="AAA", crashes=1, expiries=1, losses=1),
        KeyQueueProtocol(messages="AA", crashes=1, expiries=2, losses=2),
        KeyQueueProtocol(messages="AAB", crashes=1, expiries=0, losses=0),
        KeyQueueProtocol(messages="AAB", crashes=0, expiries=1, losses=0),
        KeyQueueProtocol(messages="AAB", crashes=0, expiries=0, losses=1),
    ],
    ids=lambda one: f"{one.messages}, {one.crashes} crashes, {one.expiries} expiries, {one.losses} lost replies",
)
def test_workers_that_abort_before_their_lease_ends_lose_double_invert_and_overlap_nothing(
    model: KeyQueueProtocol,
) -> None:
    found = explore(model)
    assert found.states > 500
    assert not found.traces, str(found)


@pytest.mark.parametrize(
    "model",
    [
        KeyQueueProtocol(messages="AAA", crashes=1, expiries=1, losses=1, aborts=False),
        KeyQueueProtocol(messages="AA", crashes=0, expiries=2, losses=1, aborts=False),
    ],
    ids=lambda one: one.messages,
)
def test_workers_that_may_sleep_can_overlap_but_lose_double_and_invert_nothing(
    model: KeyQueueProtocol,
) -> None:
    found = explore(model)
    assert found.traces.keys() == {OVERLAP}, str(found)
    assert found.traces[OVERLAP][-3:] == ["the lease on A ends too early", "w0 leases A with token 2", "w0 starts A0"]


@pytest.mark.parametrize(
    ("without", "aborts", "broken"),
    [
        (["token"], False, "an older token commits"),
        (["first", "answer"], True, "a message is committed twice"),
        (["enqueued"], True, "a message is committed twice"),
        (["enqueued"], True, "a key is committed out of order"),
        (["known"], True, OVERLAP),
        (["exclusive"], True, OVERLAP),
    ],
)
def test_each_check_is_needed(without: list[str], aborts: bool, broken: str) -> None:
    found = explore(KeyQueueProtocol(messages="AA", without=frozenset(without), aborts=aborts), until=broken)
    assert broken in found.traces, f"without {without}: {found}"


READS = ["master: XREADGROUP gives A0", "master: XCLAIM A0 for c0"]


@pytest.mark.parametrize(
    ("faults", "broken", "trace"),
    [
        (
            {"alarms": 1},
            "overlap",
            [
                *READS,
                "master: notes that c0 has A0",
                "c0: XREADGROUP 0 gives A0, starts",
                "master: c0 does not answer, its tickets move",
                "c1: XREADGROUP 0 gives A0, starts",
            ],
        ),
        (
            {"alarms": 1},
            "duplicate",
            [
                *READS,
                "master: notes that c0 has A0",
                "c0: XREADGROUP 0 gives A0, starts",
                "master: c0 does not answer, its tickets move",
                "c0: has done A0",
                "c1: XREADGROUP 0 gives A0, starts",
                "c1: has done A0",
            ],
        ),
        (
            {"crashes": 1},
            "inversion",
            [
                *READS,
                "the master dies, and reloads its session",
                "master: XREADGROUP gives A1",
                "master: XCLAIM A1 for c1",
                "c0: XREADGROUP 0 gives A0, starts",
                "c1: XREADGROUP 0 gives A1, starts",
                "c1: has done A1",
                "c0: has done A0",
            ],
        ),
        (
            {"losses": 1},
            "leak",
            [
                *READS,
                "master: notes that c0 has A0",
                "master: XREADGROUP gives A1",
                "master: XCLAIM A1 for c0",
                "master: notes that c0 has A1",
                "c0: XREADGROUP 0 gives A0, starts",
                "c0: has done A0",
                "c0: XACK A0",
                "c0: notifies the master of A0",
                "c0: XREADGROUP 0 gives A1, starts",
                "c0: has done A1",
                "c0: XACK A1",
                "c0: notifies the master of A1, and the call is lost",
            ],
        ),
    ],
)
def test_the_protocol_of_the_memo_is_broken(faults: dict[str, int], broken: str, trace: list[str]) -> None:
    found = explore(Memo(messages="AA", **faults))
    assert found.traces.get(broken) == trace, str(found)


def test_the_memo_leaks_a_ticket_but_keeps_order_without_any_fault() -> None:
    found = explore(Memo(messages="AA"))
    assert found.traces.keys() == {"leak"}, str(found)
    assert found.traces["leak"][-2:] == ["c0: notifies the master of A1", "master: notes that c0 has A1"]
