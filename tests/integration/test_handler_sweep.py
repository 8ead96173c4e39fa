"""The sweep of all handlers: what it reads again, what it finds, and how old its figures are."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from msgspec.structs import replace

from millstream.admin.acl import RoleName, acl_rule
from millstream.admin.figure_history import HandlerSample, sample_of
from millstream.admin.handler_sweep import HandlerSweep, SweepPolicy
from millstream.delivery.keyed_stream import KeyedStream, LeaseRelease
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.clocks import ManualClock
from tests.support.command_stats import commands_run
from tests.support.commandline import call
from tests.support.keyed_fixtures import joined_by_field
from tests.support.sweeps import sweep_round, swept
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]

ONLY_CHANGED = SweepPolicy(at_once=7, unchanged_at_once=0)
"""Nothing is read again but what has changed."""

KEYS = HandlerKeys("shop", "pay", "orders3")


@pytest.fixture
def places(client: Client) -> list[KeyedStream]:
    """The handler `shop.pay` on ten streams, each with an entry."""
    found = [joined_by_field(client, f"orders{n}", app="shop", handler="pay") for n in range(10)]
    for one in found:
        client.execute("XADD", one.stream, "*", "key", "x")
    return found


@pytest.fixture
def sweep(client: Client, places: list[KeyedStream]) -> Iterator[HandlerSweep]:
    with closing(HandlerSweep(client, ONLY_CHANGED)) as found:
        assert sweep_round(found) == 10
        yield found


def figures(sweep: HandlerSweep) -> HandlerSample:
    return sample_of(sweep, 0).handlers["shop.pay"]


def park(keyed: KeyedStream) -> None:
    keyed.enqueue_new(count=100, max_pending=1_000)
    (lease,) = keyed.lease_keys(queues=1, entries=10, run=1, lease_ms=60_000, now_ms=0).leases
    keyed.release_leases([LeaseRelease(lease, "park", "failed", 1)])


def test_what_does_not_change_is_not_read_again(client: Client, sweep: HandlerSweep) -> None:
    def reads_nothing() -> bool:
        before = commands_run(client.execute)
        assert sweep_round(sweep) == 0
        return set(commands_run(client.execute) - before) <= {"client|tracking", "scan", "info"}

    # A thread of another test may still use a client of its own.
    eventually(reads_nothing, "a round that reads nothing of a stream, and nothing of a handler")


def test_of_what_changes_only_that_is_read_again(client: Client, sweep: HandlerSweep) -> None:
    client.execute("XADD", "orders3", "*", "key", "y")
    assert sweep_round(sweep) == 1
    assert (figures(sweep).lag, figures(sweep).added) == (11, 11)


def test_a_key_that_is_parked_and_unparked_shows_in_the_next_round(
    client: Client, places: list[KeyedStream], sweep: HandlerSweep
) -> None:
    park(places[3])
    sweep_round(sweep)
    assert (figures(sweep).stuck, figures(sweep).parked) == (1, 1)
    assert call("key", "unpark", "shop.pay", "x", "--stream", "orders3", url=client.url).code == 0
    sweep_round(sweep)
    assert figures(sweep).stuck == 0


def test_a_key_that_is_parked_where_no_worker_runs_shows_in_the_next_round(
    client: Client, places: list[KeyedStream]
) -> None:
    places[3].enqueue_new(count=100, max_pending=1_000)
    with closing(HandlerSweep(client, ONLY_CHANGED)) as sweep:
        sweep_round(sweep)
        assert call("key", "park", "shop.pay", "x", "--stream", "orders3", url=client.url).code == 0
        sweep_round(sweep)
        assert figures(sweep).parked == 1


def test_dead_letters_that_go_show_in_the_next_round(client: Client) -> None:
    joined_by_field(client, "orders3", app="shop", handler="pay")
    client.execute("XADD", KEYS.dead_letters, "*", "a", "b")
    with closing(HandlerSweep(client, ONLY_CHANGED)) as sweep:
        sweep_round(sweep)
        assert figures(sweep).dead_letters == 1
        client.execute("DEL", KEYS.dead_letters)
        sweep_round(sweep)
        assert figures(sweep).dead_letters == 0


def test_a_new_handler_is_found_and_a_forgotten_one_is_gone(client: Client, sweep: HandlerSweep) -> None:
    joined_by_field(client, "orders3", app="shop", handler="bill")
    sweep_round(sweep)
    assert sorted(sample_of(sweep, 0).handlers) == ["shop.bill", "shop.pay"]
    assert call("forget", "shop.pay", "--yes", url=client.url).code == 0
    sweep_round(sweep)
    assert sorted(sample_of(sweep, 0).handlers) == ["shop.bill"]


@pytest.mark.parametrize("lose", [lambda client: client.execute("FLUSHALL"), None], ids=["flushed", "disconnected"])
def test_after_changes_that_may_be_missing_all_is_read_again(
    client: Client, sweep: HandlerSweep, lose: Callable[[Client], object] | None
) -> None:
    if lose:
        lose(client)
        sweep_round(sweep)
        assert sample_of(sweep, 0).handlers == {}
    else:
        client.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert sweep_round(sweep) == 10
        assert figures(sweep).streams == 10


@pytest.fixture
def untracked(client: Client) -> Iterator[Client]:
    """A user with the role `console`, but for its right to key tracking."""
    client.execute(*acl_rule("untracked", [RoleName.CONSOLE]).line.split(), ">secret", "-client|tracking")
    with Client(client.url.replace("://", "://untracked:secret@")) as found:
        yield found
    client.execute("ACL", "DELUSER", "untracked")


def test_without_key_tracking_all_is_read_in_rounds_and_the_age_says_how_long_that_takes(
    client: Client, untracked: Client
) -> None:
    for n in range(4):
        joined_by_field(client, f"orders{n}", app="shop", handler="pay")
    clock = ManualClock()
    with closing(HandlerSweep(untracked, SweepPolicy(untracked_at_once=2), clock=clock)) as sweep:
        sweep_round(sweep)
        client.execute("XADD", "orders3", "*", "key", "x")
        clock.sleep_ms(10_000)
        sweep_round(sweep)
        assert sweep.age_ms == 10_000
        clock.sleep_ms(10_000)
        sweep_round(sweep)
        assert (sweep.age_ms, figures(sweep).lag) == (10_000, 1)


def test_the_age_is_that_of_the_oldest_change_that_is_not_read_yet(client: Client, places: list[KeyedStream]) -> None:
    clock = ManualClock()
    with closing(HandlerSweep(client, SweepPolicy(at_once=1, unchanged_at_once=0), clock=clock)) as sweep:
        sweep_round(sweep)
        assert sweep.age_ms == 0
        for n in (1, 2):
            client.execute("XADD", f"orders{n}", "*", "key", "y")
        clock.sleep_ms(7_000)
        sweep.begin()
        sweep.step()
        assert (sweep.age_ms, sample_of(sweep, 0).age_ms) == (7_000, 7_000)
        sweep.step()
        assert (sweep.age_ms, figures(sweep).lag) == (0, 12)


def test_the_sums_are_those_of_a_sweep_that_begins_anew_after_any_changes(
    client: Client, places: list[KeyedStream], sweep: HandlerSweep
) -> None:
    changes: list[Callable[[], object]] = [
        lambda: client.execute("XADD", "orders1", "*", "key", "y"),
        lambda: park(places[2]),
        lambda: client.execute("XTRIM", "orders4", "MAXLEN", 0),
        lambda: client.execute("DEL", "orders5"),
        lambda: call("pause", "shop.pay", "--stream", "orders6", url=client.url),
        lambda: call("key", "skip", "shop.pay", "x", "--stream", "orders2", "--yes", url=client.url),
    ]
    seen = set()
    for change in changes:
        change()
        sweep_round(sweep)
        found, anew = (replace(one, oldest_ms=None) for one in (figures(sweep), swept(client, 0).handlers["shop.pay"]))
        assert found == anew
        seen.add(found)
    assert len(seen) == len(changes), "each change has another effect"
