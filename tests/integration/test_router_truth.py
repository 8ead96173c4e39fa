"""A stream that is replaced between two reads: what its counters show is reported as a gap, and nothing else is."""

from collections.abc import Iterator

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from millstream.router import Gap, Item, Router, Subscription
from tests.support.routers import READERS, ids, make_router, take_items
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.router]

READ = ("1-0", "2-0", "3-0")


@pytest.fixture(params=READERS)
def router(millstream_url: str, request: pytest.FixtureRequest) -> Iterator[Router]:
    with make_router(millstream_url, request.param) as made:
        yield made
        assert made.close(timeout_ms=FAIL_SAFE_S * 1000)


@pytest.fixture
def subscription(client: Client, router: Router) -> Subscription:
    """A subscription of `s` that has had three entries."""
    at_once(client, *added(*READ))
    found = router.subscribe("s")
    assert ids(take_items(found, 3)) == list(READ)
    return found


def added(*names: str) -> list[tuple[str, ...]]:
    return [("XADD", "s", name, "n", "1") for name in names]


def at_once(client: Client, *commands: tuple[str | int, ...]) -> None:
    """With no read in between."""
    client.pipeline([("MULTI",), *commands, ("EXEC",)])


def reasons(items: list[Item]) -> list[tuple[str, int | None]]:
    return [(item.reason, item.missed) for item in items if isinstance(item, Gap)]


@pytest.mark.parametrize(
    ("entries", "reason", "following"),
    [
        (("1-1", "2-5", "4-0"), "recreated", ["1-1", "2-5", "4-0"]),
        (("1-1", "2-5", "2-6", "4-0"), "recreated", ["1-1", "2-5", "2-6", "4-0"]),  # as many as the old one would have
        (("1-0", "2-5", "4-0"), "rewound", ["4-0"]),  # as after a failover to a replica that had the first one only
        (("1-0", "2-0", "2-5", "2-6", "4-0"), "rewound", ["4-0"]),  # or the first two
    ],
)
def test_a_recreated_stream_with_entries_before_and_after_the_position_is_a_gap(
    client: Client, subscription: Subscription, entries: tuple[str, ...], reason: str, following: list[str]
) -> None:
    at_once(client, ("DEL", "s"), *added(*entries))
    items = take_items(subscription, 1 + len(following))
    assert ids(items) == ["gap", *following]
    assert reasons(items) == [(reason, None)]
    at_once(client, *added("5-0"))
    assert ids(take_items(subscription, 1)) == ["5-0"]


def test_a_recreated_stream_that_was_trimmed_by_less_than_was_delivered_is_a_gap(
    client: Client, subscription: Subscription
) -> None:
    at_once(client, ("DEL", "s"), *added("4-0", "5-0", "6-0"), ("XTRIM", "s", "MAXLEN", 1))
    items = take_items(subscription, 2)
    assert (ids(items), reasons(items)) == (["gap", "6-0"], [("recreated", None)])


@pytest.mark.parametrize("deleted", [("3-0",), ("2-0", "3-0"), ("3-0", "4-0")])
def test_entries_deleted_one_by_one_are_no_gap(
    client: Client, subscription: Subscription, deleted: tuple[str, ...]
) -> None:
    at_once(client, *added("4-0", "5-0"), ("XDEL", "s", *deleted))
    for name in ("6-0", "7-0"):
        at_once(client, *added(name))
    expected = [name for name in ("4-0", "5-0", "6-0", "7-0") if name not in deleted]
    assert ids(take_items(subscription, len(expected))) == expected


def test_beginning_after_an_id_that_is_no_entry_is_no_gap(client: Client, router: Router) -> None:
    at_once(client, *added(*READ, "4-0"))
    subscription = router.subscribe("s", after="2-7")
    assert ids(take_items(subscription, 2)) == ["3-0", "4-0"]


def test_entries_added_and_trimmed_before_the_first_read_of_a_missing_stream_are_a_gap(
    client: Client, router: Router
) -> None:
    subscription = router.subscribe("s")
    eventually(lambda: (place := subscription._buffer.cursor) and place.ordinal == 0, "it to know that there is none")
    at_once(client, *added(*READ), ("XTRIM", "s", "MAXLEN", 1))
    items = take_items(subscription, 2)
    assert (ids(items), reasons(items)) == (["gap", "3-0"], [("trimmed", 2)])
    at_once(client, *added("4-0"))
    assert ids(take_items(subscription, 1)) == ["4-0"]


def test_redis_does_not_distinguish_two_histories_that_end_alike(client: Client) -> None:
    """The documented limit: nothing in Redis shows here that the stream is another one."""
    found = []
    for commands in (
        [*added(*READ), ("XADD", "s", "MAXLEN", 1, "7-0", "n", "1")],
        [*added(*READ), ("DEL", "s"), *added("4-0", "5-0", "6-0", "7-0"), ("XTRIM", "s", "MAXLEN", 1)],
    ):
        at_once(client, *commands)
        reply = client.execute("XINFO", "STREAM", "s")
        known = mapping_of(reply)
        found.append({name: value for name, value in known.items() if not name.startswith(b"radix")})
        client.execute("DEL", "s")
    assert found[0] == found[1]
