"""Following streams: the same promises, whichever way the router learns of changes."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from millstream.errors import ConfigError, MillstreamError, WrongType
from millstream.model import Message
from millstream.observability.metrics import ROUTER_SUBSCRIPTIONS, Recorder
from millstream.redis_client.client import Client
from millstream.router import END, Dropped, Gap, PoolPolicy, ReadPolicy, Router, Start, TooSlow
from millstream.router.cursors import NEWEST
from millstream.router.subscriber_buffer import Cursor, SubscriberBuffer
from tests.support.pages import run_python
from tests.support.routers import OFTEN, READERS, Subscribers, ids, ids_in, make_router, publish, take_items
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.router]


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def router(millstream_url: str, reader: Any) -> Iterator[Router]:
    with make_router(millstream_url, reader) as made:
        yield made
        assert made.close(timeout_ms=FAIL_SAFE_S * 1000)


def kept() -> int:
    """Cursors and inboxes in memory."""
    gc.collect()
    return sum(type(thing) in (Cursor, SubscriberBuffer) for thing in gc.get_objects())


def served_from(router: Router, stream: str) -> int:
    """How many cursors read the stream."""
    return len(list(router._cursors.of(stream.encode())))


def sent_bytes(client: Client) -> int:
    """What Redis has sent so far, on any connection."""
    return int(client.execute("INFO", "stats").split(b"total_net_output_bytes:")[1].split()[0])


# --- What comes ---


def test_a_stream_is_followed_from_its_beginning(client: Client, router: Router) -> None:
    publish(client, ["s"], range(3))
    subscription = router.subscribe("s")
    assert [item.fields["n"] for item in take_items(subscription, 3) if isinstance(item, Message)] == [b"0", b"1", b"2"]
    publish(client, ["s"], [3])
    [message] = take_items(subscription, 1)
    assert isinstance(message, Message)
    assert (message.stream, message.fields) == ("s", {"n": b"3"})
    assert router.reader == router.figures().reader


def test_a_stream_that_does_not_exist_yet_is_followed_when_it_is_created(client: Client, router: Router) -> None:
    subscription = router.subscribe("later")
    assert subscription.get(100) is None
    publish(client, ["later"], range(2))
    assert ids(take_items(subscription, 2)) == ids_in(client, "later")


def test_a_subscription_resumes_after_any_id(client: Client, router: Router) -> None:
    publish(client, ["s"], range(5))
    there = ids_in(client, "s")
    assert ids(take_items(router.subscribe("s", after=there[2]), 2)) == there[3:]
    assert ids(take_items(router.subscribe("s", after="0"), 5)) == there
    newest = router.subscribe("s", after=END)
    eventually(lambda: (place := newest._buffer.cursor) and place.last != NEWEST, "it to know where the end is")
    publish(client, ["s"], [5])
    assert ids(take_items(newest, 1)) == ids_in(client, "s")[5:]


def test_names_and_values_are_the_published_bytes(client: Client, router: Router) -> None:
    client.execute("XADD", b"\xffs", "*", b"\xfe", b"\x00")
    [message] = take_items(router.subscribe("\udcffs"), 1)
    assert isinstance(message, Message)
    assert message.pairs == [b"\xfe", b"\x00"]


def test_threads_and_event_loops_follow_side_by_side(client: Client, router: Router) -> None:
    with Subscribers(router, [f"s{n}" for n in range(20)]) as first:
        second: list[str] = []

        def follow() -> None:
            second.extend(item.id for item in router.subscribe("s0") if isinstance(item, Message))

        thread = threading.Thread(target=follow)
        thread.start()
        publish(client, first.got, range(5))
        first.check(client)
        eventually(lambda: second == first.got["s0"], "the thread to have as much")
        router.close()
        thread.join(FAIL_SAFE_S)
        assert not thread.is_alive()


def test_any_thread_may_ask_for_the_figures_while_streams_come_and_go(client: Client, router: Router) -> None:
    ended, errors = threading.Event(), []

    def ask() -> None:
        try:
            while not ended.is_set():
                router.figures()
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        subscriptions = [router.subscribe(f"s{n}", after="1-0") for n in range(3_000)]
        eventually(lambda: router.figures().streams >= 3_000, "all to be followed")
        subscriptions.clear()
    ended.set()
    for thread in threads:
        thread.join(FAIL_SAFE_S)
    assert not errors


# --- Sharing ---


def test_subscribers_of_one_stream_share_one_read(client: Client, router: Router) -> None:
    publish(client, ["s"], [0])
    subscriptions = [router.subscribe("s") for _ in range(200)]
    for subscription in subscriptions:
        take_items(subscription, 1)
    eventually(lambda: served_from(router, "s") == 1, "all to be served from one place")
    before = sent_bytes(client)
    client.execute("XADD", "s", "*", "n", b"x" * 1_000_000)
    for subscription in subscriptions:
        take_items(subscription, 1)
    assert sent_bytes(client) - before < 3_000_000, "each message goes over the wire once, not once a subscriber"


def test_a_late_subscriber_catches_up_and_joins_with_nothing_lost_or_doubled(client: Client, router: Router) -> None:
    publish(client, ["s"], range(700))
    early = router.subscribe("s")
    seen = ids(take_items(early, 700))
    stopped = threading.Event()

    def keep_publishing() -> None:
        while not stopped.is_set():
            publish(client, ["s"], range(7))

    thread = threading.Thread(target=keep_publishing)
    thread.start()
    late = [router.subscribe("s", after=seen[at]) for at in (0, 100, 699)]
    got = [ids(take_items(one, 900)) for one in late]
    stopped.set()
    thread.join()
    everything = ids_in(client, "s")
    starts = (1, 101, 700)
    for start, found in zip(starts, got, strict=True):
        assert found == everything[start : start + 900]
    # None that is full may hold up what follows.
    for one, so_far in zip((early, *late), (700, *(start + 900 for start in starts)), strict=True):
        assert ids(take_items(one, len(everything) - so_far)) == everything[so_far:]
    eventually(lambda: served_from(router, "s") == 1, "the late ones to have joined")


def test_a_hot_stream_does_not_starve_the_others(client: Client, millstream_url: str, reader: Any) -> None:
    client.pipeline([("XADD", "hot", "*", "n", n) for n in range(30_000)])
    publish(client, ["cold"], [0])

    async def main() -> None:
        # In one loop with the router, so that it learns of both at once, and reads nothing while the test looks.
        async with make_router(millstream_url, reader) as router:
            hot, cold = router.subscribe("hot", buffer=50_000), router.subscribe("cold")
            await anext(cold)
            assert hot.buffered < 30_000, "the hot stream's history is read in small helpings, in turn with others"
            assert ids([await anext(hot) for _ in range(30_000)]) == ids_in(client, "hot")

    asyncio.run(main())


# --- Slow subscribers ---


def test_a_slow_subscriber_is_read_on_for_when_its_buffer_has_room_and_delays_no_other(
    client: Client, router: Router
) -> None:
    slow, fast = router.subscribe("s", buffer=10), router.subscribe("s")
    publish(client, ["s"], range(500))
    everything = ids_in(client, "s")
    assert ids(take_items(fast, 500)) == everything
    eventually(lambda: slow.buffered == 10, "the slow one's buffer to be full")
    publish(client, ["s"], range(500))
    assert ids(take_items(fast, 500)) == ids_in(client, "s")[500:]
    assert slow.buffered == 10
    assert ids(take_items(slow, 1000)) == ids_in(client, "s")
    publish(client, ["s"], [0])
    assert ids(take_items(slow, 1)) == ids(take_items(fast, 1))


def test_the_oldest_messages_are_dropped_and_counted_with_drop_oldest(client: Client, router: Router) -> None:
    subscription = router.subscribe("s", buffer=10, when_full="drop-oldest")
    publish(client, ["s"], range(3))
    assert len(take_items(subscription, 1)) == 1
    publish(client, ["s"], range(97))
    marker = router.subscribe("s", after="0")
    take_items(marker, 100)
    eventually(lambda: subscription.dropped == 89, "all to have come")
    assert subscription.buffered == 10
    items = take_items(subscription, 11)
    assert sum(item.count for item in items if isinstance(item, Dropped)) == 89
    assert ids([item for item in items if not isinstance(item, Dropped)]) == ids_in(client, "s")[-10:]
    publish(client, ["s"], [0])
    assert ids(take_items(subscription, 1)) == ids_in(client, "s")[-1:]


def test_a_disconnected_subscriber_learns_the_id_after_which_to_resume(client: Client, router: Router) -> None:
    subscription = router.subscribe("s", buffer=10, when_full="disconnect")
    publish(client, ["s"], range(25))
    eventually(lambda: isinstance(subscription._buffer.ending, TooSlow), "it to be disconnected")
    assert ids(take_items(subscription, 10)) == ids_in(client, "s")[:10]
    with pytest.raises(TooSlow) as caught:
        next(subscription)
    subscription = router.subscribe("s", after=caught.value.after)
    rest = take_items(subscription, 25 - ids_in(client, "s").index(caught.value.after) - 1)
    assert ids(rest) == ids_in(client, "s")[-len(rest) :]
    assert len(rest) == 15


# --- Gaps ---


def test_trimming_past_the_position_is_a_gap_with_its_size(client: Client, router: Router) -> None:
    slow = router.subscribe("s", buffer=10)
    publish(client, ["s"], range(60))
    eventually(lambda: slow._buffer.paused, "it to be read on for no more")
    client.execute("XTRIM", "s", "MAXLEN", 20)
    items = take_items(slow, 31)
    [gap] = [item for item in items if isinstance(item, Gap)]
    assert (gap.reason, gap.missed, gap.after) == ("trimmed", 30, ids(items)[9])
    assert ids(items)[11:] == ids_in(client, "s")


def test_a_stream_trimmed_to_nothing_is_one_gap(client: Client, router: Router) -> None:
    slow = router.subscribe("s", buffer=2)
    publish(client, ["s"], range(5))
    eventually(lambda: slow._buffer.paused, "it to be read on for no more")
    client.execute("XTRIM", "s", "MAXLEN", 0)
    items = take_items(slow, 3)
    assert isinstance(items[2], Gap)
    assert items[2].missed == 3
    publish(client, ["s"], range(2))
    assert ids(take_items(slow, 2)) == ids_in(client, "s")


def test_entries_trimmed_or_deleted_after_they_were_read_are_no_gap(client: Client, router: Router) -> None:
    subscription = router.subscribe("s")
    for n in range(5):
        client.execute("XADD", "s", "MAXLEN", 1, "*", "n", n)
        assert isinstance(take_items(subscription, 1)[0], Message)
    client.execute("XDEL", "s", ids_in(client, "s")[0])
    publish(client, ["s"], range(2))
    assert "gap" not in ids(take_items(subscription, 2))
    client.execute("XTRIM", "s", "MAXLEN", 0)
    publish(client, ["s"], [0])
    assert "gap" not in ids(take_items(subscription, 1))


def test_resuming_where_the_stream_was_trimmed_is_a_gap(client: Client, router: Router) -> None:
    publish(client, ["s"], range(10))
    there = ids_in(client, "s")
    client.execute("XTRIM", "s", "MAXLEN", 3)
    items = take_items(router.subscribe("s", after=there[2]), 4)
    assert ids(items) == ["gap", *there[7:]]
    assert isinstance(items[0], Gap)
    assert items[0].missed is None, "nobody kept count"


@pytest.mark.parametrize("first", ["1-1", "*"])
def test_a_recreated_stream_is_a_gap_and_read_from_its_beginning(
    client: Client, millstream_url: str, reader: Any, first: str
) -> None:
    with make_router(millstream_url, reader, read=OFTEN) as router:
        subscription = router.subscribe("s")
        publish(client, ["s"], range(5))
        take_items(subscription, 5)
        # At once, and after the deletion was noticed.
        for pause_ms in (0, 500):
            time.sleep(0.005)  # made anew within the same millisecond, its ids could be those that were delivered
            client.execute("DEL", "s")
            assert pause_ms == 0 or subscription.get(pause_ms) is None
            client.execute("XADD", "s", first, "n", 0)
            items = take_items(subscription, 2)
            assert isinstance(items[0], Gap)
            assert items[0].reason == "recreated"
            assert ids(items)[1:] == ids_in(client, "s")
            publish(client, ["s"], [1])
            assert ids(take_items(subscription, 1)) == ids_in(client, "s")[1:]


def test_flushall_is_detected_in_every_stream(client: Client, millstream_url: str, reader: Any) -> None:
    sweep = {"read": OFTEN} if reader == "pool" else {}
    with (
        make_router(millstream_url, reader, **sweep) as router,
        Subscribers(router, [f"s{n}" for n in range(50)]) as crowd,
    ):
        publish(client, crowd.got, range(3))
        crowd.wait_for(150)
        client.execute("FLUSHALL")
        client.pipeline([("XADD", name, "7-7", "n", 0) for name in crowd.got])
        crowd.wait_for(200)
        assert {gap.stream for gap in crowd.gaps} == set(crowd.got)
        assert {tuple(got[3:]) for got in crowd.got.values()} == {("7-7",)}


# --- A failure of one subscription affects no other ---


def test_a_key_of_another_type_ends_its_own_subscription_only(client: Client, router: Router) -> None:
    client.execute("SET", "bad", "text")
    bad, good = router.subscribe("bad"), router.subscribe("good")
    publish(client, ["good"], range(3))
    take_items(good, 3)
    with pytest.raises(WrongType, match="bad is not a stream"):
        bad.get(FAIL_SAFE_S * 1000)
    client.execute("DEL", "good")
    client.execute("SET", "good", "text")
    if router.reader == "tracking":
        with pytest.raises(WrongType):
            good.get(FAIL_SAFE_S * 1000)
    client.execute("DEL", "bad")
    publish(client, ["bad"], [0])
    assert ids(take_items(router.subscribe("bad"), 1)) == ids_in(client, "bad")


# --- Leaving ---


def test_unsubscribing_frees_all_resources(client: Client, router: Router) -> None:
    publish(client, [f"s{n}" for n in range(500)], range(3))
    keep = router.subscribe("keep")
    subscriptions = [router.subscribe(f"s{n}") for n in range(500)]
    for one in subscriptions:
        take_items(one, 1)
    assert kept() >= 1000
    subscriptions[0].close()
    subscriptions[0].close()
    assert subscriptions[0].get(0) is None
    subscriptions.clear()  # dropped, not closed
    del one
    eventually(lambda: router.figures().subscriptions == router.figures().streams == 1, "all but one to be gone")
    publish(client, ["keep", "s1"], [0])
    take_items(keep, 1)
    eventually(lambda: kept() == 2, "nothing of the others to be left in memory")


def test_leaving_an_async_loop_unsubscribes(client: Client, router: Router) -> None:
    async def next_item() -> Any:
        async for message in router.subscribe("s"):
            return message
        return None

    publish(client, ["s"], range(2))
    assert isinstance(asyncio.run(next_item()), Message)
    eventually(lambda: router.figures().subscriptions == 0, "it to be gone")


def test_a_cancelled_reader_can_continue(client: Client, router: Router) -> None:
    async def main() -> None:
        subscription = router.subscribe("s")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(subscription), 0.05)
        publish(client, ["s"], range(2))
        assert ids([await anext(subscription), await anext(subscription)]) == ids_in(client, "s")

    asyncio.run(main())


def test_two_readers_of_one_subscription_are_refused(router: Router) -> None:
    async def main() -> None:
        subscription = router.subscribe("s")
        first = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0)
        with pytest.raises(MillstreamError, match="subscribe once more"):
            await anext(subscription)
        first.cancel()

    asyncio.run(main())


def test_closing_the_router_ends_subscriptions_after_their_buffered_messages(client: Client, router: Router) -> None:
    publish(client, ["s"], range(3))
    subscription, empty = router.subscribe("s"), router.subscribe("nothing")
    eventually(lambda: subscription.buffered == 3, "the messages")
    waiting = threading.Thread(target=lambda: list(empty))
    waiting.start()
    assert router.close(timeout_ms=FAIL_SAFE_S * 1000)
    waiting.join(FAIL_SAFE_S)
    assert not waiting.is_alive()
    assert ids(list(subscription)) == ids_in(client, "s")
    with pytest.raises(ConfigError, match="closed"):
        router.subscribe("s")


def test_a_subscription_that_is_read_with_a_time_limit_shows_when_it_has_ended(client: Client, router: Router) -> None:
    publish(client, ["s"], range(2))
    subscription, broken = router.subscribe("s"), router.subscribe("text")
    eventually(lambda: subscription.buffered == 2, "the messages")
    assert (subscription.get(100) is not None, subscription.ended) == (True, False)
    client.execute("SET", "text", "x")
    eventually(lambda: router.figures().subscriptions == 1, "the other one to be ended")
    assert not broken.ended
    with pytest.raises(WrongType):
        broken.get(100)
    assert router.close(timeout_ms=FAIL_SAFE_S * 1000)
    assert not subscription.ended, "it still holds one"
    assert subscription.get(100) is not None
    assert subscription.ended
    assert subscription.get() is None


def test_a_subscription_in_an_event_loop_shows_when_it_has_ended(millstream_url: str, reader: Any) -> None:
    async def main() -> None:
        async with make_router(millstream_url, reader) as router:
            subscription, closed = router.subscribe("s"), router.subscribe("s")
            assert not subscription.ended
            closed.close()
            assert closed.ended
        assert subscription.ended

    asyncio.run(main())


def test_the_example_of_the_documentation_follows(client: Client, millstream_url: str) -> None:
    printed: list[tuple[Any, ...]] = []
    names = run_python("docs/router.md", {"print": lambda *parts: printed.append(parts)}, only=[1])
    publish(client, ["s"], range(3))
    last = ids_in(client, "s")[-1]

    async def main() -> None:
        async with Router(millstream_url) as router:
            following = [asyncio.create_task(names["follow"](router, "s", after)) for after in ("0", END)]
            thread = asyncio.create_task(asyncio.to_thread(names["follow_in_a_thread"], router, "later"))
            await asyncio.to_thread(eventually, lambda: len(printed) == 4, "three messages and a start")
        assert await asyncio.gather(*following, thread) == [last, last, None]

    asyncio.run(main())
    assert ("from", last, "on") in printed


def test_invalid_options_are_refused(millstream_url: str) -> None:
    for wrong in ({"buffer": 0}, {"when_full": "shout"}, {"after": "yesterday"}):
        with pytest.raises(ConfigError):
            Router(millstream_url).subscribe("s", **wrong)
    with pytest.raises(ConfigError):
        Router(millstream_url, reader="magic")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        ReadPolicy(count=0)


def test_router_figures_are_exported_as_metrics(client: Client, millstream_url: str, reader: Any) -> None:
    recorder = Recorder()
    with make_router(millstream_url, reader, metrics=recorder) as router:
        subscriptions = [router.subscribe(f"s{n}") for n in range(3)]
        eventually(lambda: recorder.value(ROUTER_SUBSCRIPTIONS) == 3, "the gauge")
        assert len(subscriptions) == 3


def test_ten_thousand_closed_subscriptions_leave_nothing_behind_and_a_new_one_is_served(
    client: Client, router: Router
) -> None:
    for n in range(10_000):
        router.subscribe(f"s{n}").close()
    eventually(lambda: router.figures().subscriptions == router.figures().streams == 0, "all to be gone")
    subscription = router.subscribe("s0")
    publish(client, ["s0"], [0])
    assert ids(take_items(subscription, 1)) == ids_in(client, "s0")


# --- The pool's measures ---


def test_the_pool_grows_with_its_streams_up_to_its_cap(client: Client, millstream_url: str) -> None:
    pool = PoolPolicy(workers=1, max_workers=3, streams=10, block_ms=20)
    with Router(millstream_url, reader="pool", pool=pool) as router:
        first = [router.subscribe(f"s{n}") for n in range(5)]
        eventually(lambda: router.figures().connections == 2, "one worker beside the reading connection")
        more = [router.subscribe(f"t{n}") for n in range(100)]
        eventually(lambda: router.figures().connections == 4, "all the workers that are allowed")
        publish(client, [one.stream for one in first + more], [0])
        for one in first + more:
            take_items(one, 1)
        more.clear()
        del one
        eventually(lambda: router.figures().connections <= 3, "the pool to shrink")


def test_the_pool_shrinks_when_the_last_subscriptions_leave_together(millstream_url: str) -> None:
    pool = PoolPolicy(workers=1, max_workers=3, streams=10, block_ms=20)
    with Router(millstream_url, reader="pool", pool=pool) as router:
        subscriptions = [router.subscribe(f"s{n}") for n in range(30)]
        eventually(lambda: router.figures().connections == 4, "all the workers that are allowed")
        subscriptions.clear()
        eventually(lambda: router.figures().connections == 2, "the pool to be as small as it may")


def test_a_pool_that_does_not_block_delivers_messages_too(client: Client, millstream_url: str) -> None:
    pool = PoolPolicy(workers=1, max_workers=1, streams=10, block_ms=None)
    with Router(millstream_url, reader="pool", pool=pool) as router:
        subscriptions = [router.subscribe(f"s{n}") for n in range(30)]
        publish(client, [one.stream for one in subscriptions], range(3))
        for one in subscriptions:
            assert ids(take_items(one, 3)) == ids_in(client, one.stream)


def test_a_subscriber_that_begins_at_the_end_receives_the_id_of_the_end(client: Client, router: Router) -> None:
    publish(client, ["s"], range(3))
    subscription, empty = (
        router.subscribe("s", after=END, report_start=True),
        router.subscribe("e", after=END, report_start=True),
    )
    assert take_items(subscription, 1) == [Start(stream="s", after=ids_in(client, "s")[-1])]
    assert take_items(empty, 1) == [Start(stream="e", after="0-0")]
    publish(client, ["s"], [3])
    assert ids(take_items(subscription, 1)) == ids_in(client, "s")[-1:]


def test_no_subscriber_waits_for_a_router_that_has_failed(client: Client, millstream_url: str, reader: Any) -> None:
    publish(client, ["s0"], [0])
    with make_router(millstream_url, reader) as router:
        early = router.subscribe("s0")
        take_items(early, 1)
        router._reactor.call(lambda: 1 // 0)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            next(iter(early))
        with pytest.raises(ConfigError, match="has failed; create a new one: ZeroDivisionError"):
            router.subscribe("s1")
        assert router.close(timeout_ms=FAIL_SAFE_S * 1000)
