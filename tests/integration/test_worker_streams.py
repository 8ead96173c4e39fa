"""Workers of a handler with order="stream": whole streams have one owner at a time, and stay in order."""

import asyncio
import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from millstream import App, Message, Retry, State
from millstream.admin.liveness import find_workers
from millstream.balancer import announce
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import AccessDenied, ConfigError, StaleOwner
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, ServiceKeys, live_workers_key
from millstream.testing.topologies import cluster
from millstream.worker.incarnations import NAME_LEASE_MS
from millstream.worker.ordering.ordering import names_to_work_on
from millstream.worker.static_membership import StaticMembership
from tests.support.command_stats import scripts_run
from tests.support.commandline import call
from tests.support.fields import text_fields
from tests.support.running_codes import CODE
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import QUICK, ending, make, working

pytestmark = [pytest.mark.worker]

SERVICE = ServiceKeys("millstream:app.handle")


def count(message: Message, state: State) -> dict[str, Any]:
    state["count"] = state.get("count", 0) + 1
    fields: dict[str, Any] = {"stream": message.stream, "n": message.text("n"), "count": state["count"]}
    return {**fields, "fence": message.fence, "key": message.key or b"-"}


def fill(client: Client, streams: int, each: int, first: int = 0) -> None:
    """Add entries round robin, so that no stream is finished before another."""
    client.pipeline([("XADD", f"s:{s}", "*", "n", n) for n in range(first, first + each) for s in range(streams)])


def rows(client: Client) -> dict[str, list[dict[str, str]]]:
    """Return the outputs of each stream, in the order of their commits."""
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for _, pairs in client.execute("XRANGE", "out", "-", "+"):
        row = text_fields(pairs)
        found[row["stream"]].append(row)
    return found


def check_order(client: Client, streams: int, each: int) -> None:
    """Check: each message once, each stream in order, on the state of the message before, with growing fences."""
    found = rows(client)
    assert set(found) == {f"s:{s}" for s in range(streams)}
    for name, some in found.items():
        assert [int(row["n"]) for row in some] == list(range(each)), name
        assert [int(row["count"]) for row in some] == list(range(1, each + 1)), name
        fences = [int(row["fence"]) for row in some]
        assert fences == sorted(fences), name
        assert {row["key"] for row in some} == {name}


def owners(client: Client) -> dict[str, str]:
    found = client.execute("HGETALL", SERVICE.owners)
    return {found[i].decode(): found[i + 1].decode().split(" ", 1)[1] for i in range(0, len(found), 2)}


async def count_async(message: Message, state: State) -> dict[str, Any]:
    await asyncio.sleep(0.001 * (int(message.fields["n"]) % 3))
    return count(message, state)


@pytest.mark.parametrize("function", [count, count_async])
def test_messages_of_a_stream_keep_their_order_while_workers_come_and_go(
    client: Client, function: Callable[..., Any]
) -> None:
    handler = make(function, pattern="s:*", order="stream")
    fill(client, 10, 20)
    with working(client, handler, "w1"):
        eventually(lambda: sum(map(len, rows(client).values())) >= 50)
        with working(client, handler, "w2"):
            fill(client, 10, 20, first=20)
            eventually(lambda: len(set(owners(client).values())) == 2)
            fill(client, 10, 20, first=40)
            eventually(lambda: sum(map(len, rows(client).values())) >= 500)
        fill(client, 10, 20, first=60)
        eventually(lambda: sum(map(len, rows(client).values())) >= 800)
    check_order(client, 10, 80)


def test_one_message_of_a_stream_runs_at_a_time_beside_other_streams(client: Client) -> None:
    running: dict[str, int] = defaultdict(int)
    most: dict[str, int] = defaultdict(int)
    lock = threading.Lock()

    def watch(message: Message) -> None:
        for name in (message.stream, "all"):
            with lock:
                running[name] += 1
                most[name] = max(most[name], running[name])
        eventually(lambda: most["all"] > 1, "a run on another stream")
        time.sleep(0.02)  # another of this stream could run beside it meanwhile
        for name in (message.stream, "all"):
            with lock:
                running[name] -= 1

    fill(client, 6, 5)
    handler = make(watch, pattern="s:*", order="stream")
    with working(client, handler, "w1") as one, working(client, handler, "w2") as two:
        eventually(lambda: one.loop_metrics.committed + two.loop_metrics.committed == 30)
    del most["all"]
    assert set(most.values()) == {1}


def test_a_worker_that_stops_releases_its_streams_at_once(client: Client) -> None:
    handler = make(count, pattern="s:*", order="stream")
    fill(client, 6, 1)
    with working(client, handler, "stays"):
        with working(client, handler, "leaves"):
            eventually(lambda: len(set(owners(client).values())) == 2)
            eventually(lambda: sum(map(len, rows(client).values())) == 6)
        assert "leaves" not in owners(client).values(), "it has left the service, and no lease has to expire"
        fill(client, 6, 1, first=1)
        eventually(lambda: sum(map(len, rows(client).values())) == 12)
        assert set(owners(client).values()) == {"stays"}
    assert owners(client) == {}
    check_order(client, 6, 2)


def test_a_failing_message_keeps_its_place_in_its_stream_while_others_go_on(client: Client) -> None:
    def handle(message: Message, state: State) -> dict[str, Any]:
        if message.stream == "s:0" and message.fields["n"] == b"0" and message.attempt < 3:
            raise RuntimeError("not yet")
        return count(message, state)

    fill(client, 3, 4)
    keys = HandlerKeys("app", "handle", "s:0")
    retry = Retry(attempts=3, delay_ms=600_000, max_delay_ms=600_000)
    with working(client, make(handle, pattern="s:*", order="stream", retry=retry)) as loop:
        eventually(lambda: sum(map(len, rows(client).values())) >= 8)
        for failed in (1, 2):
            eventually(lambda: loop.loop_metrics.retried == failed)  # noqa: B023 - it is over by then
            assert "s:0" not in rows(client)
            eventually(lambda: client.execute("ZCARD", keys.backoff) == 1)
            (queue,) = client.execute("ZRANGE", keys.backoff, 0, -1)
            client.execute("ZADD", keys.backoff, "XX", 0, queue)  # makes it due
        eventually(lambda: sum(map(len, rows(client).values())) >= 12)
    check_order(client, 3, 4)


def test_new_streams_of_the_pattern_are_found_while_the_worker_runs(client: Client) -> None:
    with working(client, make(count, pattern="s:*", order="stream")):
        fill(client, 3, 2)
        eventually(lambda: sum(map(len, rows(client).values())) == 6)
        fill(client, 5, 2, first=2)
        eventually(lambda: sum(map(len, rows(client).values())) == 16)


def test_announced_streams_are_read_and_no_others(client: Client) -> None:
    fill(client, 3, 2)
    announce(client, "calls", "s:0")
    with working(client, make(count, announced="calls", order="stream")):
        announce(client, "calls", "s:2", {"priority": 1})
        eventually(lambda: sum(map(len, rows(client).values())) == 4)
    assert set(rows(client)) == {"s:0", "s:2"}


@pytest.mark.parametrize("options", [{"announced": "calls"}, {"pattern": "s:*"}])
def test_the_command_shows_the_lag_of_each_stream(client: Client, options: dict[str, Any]) -> None:
    fill(client, 1, 2)
    service = "calls" if "announced" in options else "app.handle"
    if service == "calls":
        announce(client, service, "s:0")
    with working(client, make(count, order="stream", **options), "w1"):
        eventually(lambda: len(rows(client)["s:0"]) == 2)
    fill(client, 1, 3)
    found = call("lease", "list", service, "--json", "--url", client.url).json_lines()
    assert [(row["stream"], row["lag"]) for row in found] == [("s:0", 3)]


def test_info_counts_live_workers_and_not_all_former_ones_of_the_stream(client: Client) -> None:
    def workers() -> list[int]:
        return [row["consumers"] for row in call("info", "app", "--json", "--url", client.url).json()["handlers"]]

    handler, group = make(count, pattern="s:*", order="stream"), HandlerKeys("app", "handle", "s:0").group
    for number in range(3):
        with working(client, handler, f"w{number}"):
            fill(client, 1, 1)
            eventually(lambda: len(rows(client).get("s:0", ())) == number + 1)  # noqa: B023 - it is over by then
            client.execute("XGROUP", "CREATECONSUMER", "s:0", group, f"killed{number}")
            assert workers() == [1]
    assert len(client.execute("XINFO", "CONSUMERS", "s:0", group)) >= 3


def test_info_counts_consumers_that_were_active_or_whose_name_is_registered(client: Client) -> None:
    keys = HandlerKeys("app", "handle", "in")
    client.execute("XGROUP", "CREATE", "in", keys.group, "0", "MKSTREAM")
    client.execute("HSET", keys.meta, "owner", "workers", "committed_id", "0-0")
    for name in ("quiet", "held", "heard"):
        client.execute("XGROUP", "CREATECONSUMER", "in", keys.group, name)
    client.execute("SET", "millstream:worker:app:held", "token")

    def found() -> Collection[str]:
        client.execute("XADD", "in", "*", "n", 1)
        client.execute("XREADGROUP", "GROUP", keys.group, "heard", "COUNT", 1, "STREAMS", "in", ">")
        return find_workers(client, [keys], idle_ms=500)[keys]

    eventually(lambda: found() == {"held", "heard"})
    assert find_workers(client, [keys]) == {keys: {"quiet", "held", "heard"}}


def test_a_worker_that_has_read_nothing_yet_is_alive_as_long_as_its_supervisor_announces_it(client: Client) -> None:
    keys, other = HandlerKeys("app", "handle", "in"), HandlerKeys("app", "other", "in")
    client.execute("XGROUP", "CREATE", "in", keys.group, "$", "MKSTREAM")
    names = StaticMembership(client, "app", "w", handlers={"handle": CODE})
    assert names.acquire(2) == ["w-0", "w-1"]
    assert find_workers(client, [keys, other]) == {keys: {"w-0", "w-1"}, other: set()}
    names.release()
    assert find_workers(client, [keys]) == {keys: set()}
    names.acquire(1)
    client.execute("ZADD", live_workers_key("app", "handle"), "XX", 1, "w-0")
    assert find_workers(client, [keys]) == {keys: set()}, "its supervisor died long ago"
    names.renew()
    assert find_workers(client, [keys]) == {keys: {"w-0"}}
    assert 0 < client.execute("PTTL", live_workers_key("app", "handle")) <= NAME_LEASE_MS
    client.execute("SET", live_workers_key("app", "handle"), "of another program")
    assert find_workers(client, [keys]) == {keys: set()}


def test_a_parked_stream_is_shown_like_a_parked_key(client: Client) -> None:
    def refuse(message: Message) -> None:
        raise RuntimeError("never")

    fill(client, 1, 2)
    retry = Retry(attempts=1, then="park")
    with working(client, make(refuse, pattern="s:*", order="stream", retry=retry)) as loop:
        eventually(lambda: loop.loop_metrics.parked == 1)
    assert client.execute("HKEYS", HandlerKeys("app", "handle", "s:0").parked) == [b"ks:0"]


NO_SWEEPS = replace(QUICK, sweep_ms=3_600_000)


def test_the_next_lease_of_a_stream_waits_for_no_sweep(client: Client) -> None:
    fill(client, 1, 300)
    with working(client, make(count, pattern="s:*", order="stream"), policy=NO_SWEEPS):
        eventually(lambda: len(rows(client)["s:0"]) == 300)
    check_order(client, 1, 300)


def test_a_retry_waits_for_its_back_off_and_for_no_sweep(client: Client) -> None:
    def handle(message: Message, state: State) -> dict[str, Any]:
        if message.attempt < 6:
            raise RuntimeError("not yet")
        return count(message, state)

    fill(client, 2, 1)
    handler = make(handle, pattern="s:*", order="stream", retry=Retry(attempts=6, delay_ms=50, factor=1, jitter=0))
    with working(client, handler, policy=NO_SWEEPS):
        eventually(lambda: len(rows(client)) == 2)


def test_a_stream_that_cannot_be_processed_delays_no_other_and_returns_when_it_is_mended(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, 3, 1)
    client.execute("XADD", "s:a}b", "*", "n", 0)
    with working(client, make(count, pattern="s:*", order="stream")):
        eventually(lambda: len(rows(client)) == 3)
        client.execute("DEL", "s:2")
        client.execute("SET", "s:2", "no stream")
        eventually(lambda: "cannot process stream 's:2'" in caplog.text)
        fill(client, 2, 1, first=1)
        eventually(lambda: sum(map(len, rows(client).values())) == 5)
        client.execute("DEL", "s:2")
        client.execute("XADD", "s:2", "*", "n", 7)
        eventually(lambda: rows(client)["s:2"][-1]["n"] == "7")
    assert "cannot process stream 's:a}b'" in caplog.text
    assert "processes stream 's:2' again" in caplog.text


def test_a_stream_that_breaks_while_its_messages_run_ends_no_worker_and_returns_once_their_runs_have_ended(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    begun: SimpleQueue[str] = SimpleQueue()
    broken, over = threading.Event(), threading.Event()
    running: list[str] = []
    overlaps: list[str] = []

    def handle(message: Message, state: State) -> dict[str, Any]:
        if message.stream == "s:0":
            number = str(message.text("n"))
            overlaps.extend(running)
            running.append(number)
            begun.put(number)
            (broken if number == "0" else over).wait(FAIL_SAFE_S)
            running.remove(number)
        return count(message, state)

    def overwrite(name: str) -> None:
        client.execute("DEL", name)
        client.execute("SET", name, "no stream")
        eventually(lambda: f"cannot process stream '{name}'" in caplog.text)

    fill(client, 3, 2)
    with working(client, make(handle, pattern="s:*", order="stream")):
        assert begun.get(timeout=FAIL_SAFE_S) == "0"
        eventually(lambda: sum(map(len, rows(client).values())) == 4)
        overwrite("s:0")
        broken.set()
        assert begun.get(timeout=FAIL_SAFE_S) == "1", "it was leased together with the first one"
        eventually(lambda: "messages of s:0 are not committed: this worker leaves out the stream" in caplog.text)
        client.execute("XADD", "s:2", "*", "n", 7)
        eventually(lambda: rows(client)["s:2"][-1]["n"] == "7")
        overwrite("s:1")  # it is tried again after s:0
        for name in ("s:0", "s:1"):
            client.execute("DEL", name)
            client.execute("XADD", name, "*", "n", 7)
        eventually(lambda: "processes stream 's:1' again" in caplog.text)
        is_back = "processes stream 's:0' again" in caplog.text
        over.set()
        assert not is_back, "a run on it goes on"
        eventually(lambda: [row["n"] for row in rows(client).get("s:0", ())] == ["7"])
    assert overlaps == []


def left_out(client: Client, service: str) -> dict[str, str | None]:
    """Return the excluded streams that the command shows, and why."""
    found = call("lease", "list", service, "--json", "--url", client.url).json_lines()
    return {row["stream"]: row["excluded_reason"] for row in found if row["state"] == "excluded"}


def test_an_announced_name_that_is_no_stream_is_left_out_until_it_is_one(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, 1, 1)
    client.execute("SET", "te\nxt", "no stream")
    for name in ("te\nxt", "s:0"):
        announce(client, "calls", name)
    with working(client, make(count, announced="calls", order="stream")):
        eventually(lambda: len(rows(client)) == 1)
        eventually(lambda: "te\nxt" in left_out(client, "calls"))
        assert "holds a string where a stream is needed" in (left_out(client, "calls")["te\nxt"] or "")
        assert "excluded" in call("lease", "list", "calls", "--url", client.url).out
        assert r"cannot process stream 'te\nxt'" in caplog.text
        assert r"run: millstream lease remove calls 'te\nxt'" in caplog.text
        client.execute("DEL", "te\nxt")
        client.execute("XADD", "te\nxt", "*", "n", 7)
        eventually(lambda: len(rows(client)) == 2)
        eventually(lambda: left_out(client, "calls") == {})


def login(client: Client, *rules: str) -> str:
    """Return the URL of a user with all rights except those of these rules."""
    client.execute("ACL", "SETUSER", "limited", "reset", "on", ">secret", "+@all", "~*", *rules)
    return client.url.replace("redis://", "redis://limited:secret@", 1)


@pytest.mark.parametrize("options", [{"announced": "calls"}, {"pattern": "s:*"}])
def test_a_stream_that_the_user_may_not_access_ends_no_worker_and_returns_with_the_right(
    client: Client, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    fill(client, 3, 1)
    for name in ("s:0", "s:1", "s:2"):
        announce(client, "calls", name)
    some = [f"~{key}" for name in ("s:0", "s:1") for key in (name, f"millstream:{{{name}}}*")]
    allowed = ("resetkeys", "~out", "~*-input*", *some)
    with Client(login(client, *allowed)) as user, working(user, make(count, order="stream", **options)):
        eventually(lambda: set(rows(client)) == {"s:0", "s:1"})
        eventually(lambda: "cannot process stream 's:2'" in caplog.text)
        assert "the rights that --stream 's:2' adds in millstream acl worker leases" in caplog.text
        fill(client, 3, 1, first=1)
        eventually(lambda: sum(map(len, rows(client).values())) == 4)
        login(client, *allowed, "~s:2", "~millstream:{s:2}*")
        eventually(lambda: len(rows(client).get("s:2", ())) == 2)
    client.execute("ACL", "DELUSER", "limited")


def test_a_revoked_right_excludes_its_own_stream_only(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    fill(client, 3, 1)
    some = [f"~{key}" for name in ("s:0", "s:1") for key in (name, f"millstream:{{{name}}}*")]
    with Client(login(client)) as user, working(user, make(count, pattern="s:*", order="stream")):
        eventually(lambda: len(rows(client)) == 3)
        login(client, "resetkeys", "~out", "~*-input*", *some)
        eventually(lambda: "cannot process stream 's:2'" in caplog.text)
        fill(client, 3, 1, first=1)
        eventually(lambda: sum(map(len, rows(client).values())) == 5)
    client.execute("ACL", "DELUSER", "limited")


def test_a_worker_without_the_right_to_key_tracking_polls(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    fill(client, 5, 3)
    handler = make(count, pattern="s:*", order="stream")
    with Client(login(client, "-client|tracking")) as user, working(user, handler):
        eventually(lambda: sum(map(len, rows(client).values())) == 15)
        fill(client, 5, 3, first=3)
        eventually(lambda: sum(map(len, rows(client).values())) == 30)
    check_order(client, 5, 6)
    assert "client|tracking" in caplog.text
    client.execute("ACL", "DELUSER", "limited")


def test_a_worker_on_idle_streams_calls_redis_seldom(client: Client) -> None:
    def scripts_in(duration_s: float) -> float:
        """Return a second, after so long a time or longer."""
        began_s, before = time.monotonic(), scripts_run(client)
        time.sleep(duration_s)
        return (scripts_run(client) - before) / (time.monotonic() - began_s)

    fill(client, 500, 1)
    with working(client, make(count, pattern="s:*", order="stream")):
        eventually(lambda: len(rows(client)) == 500)
        eventually(lambda: scripts_in(0.5) < 500, "less than one a second for each of the streams")


def test_streams_may_come_while_those_of_a_worker_are_listed(client: Client) -> None:
    def add(phase: str, info: Any) -> None:  # as another thread may, which runs when the garbage collector does
        streams[f"later:{len(streams)}"] = one

    one = ReliableStream(client, "s:0", app="app", handler="handle", consumer="w1")
    streams = {f"s:{n}": one for n in range(5_000)}
    gc.callbacks.append(add)
    try:
        assert set(names_to_work_on(streams)) == {"s:0"}
        gc.collect()
    finally:
        gc.callbacks.remove(add)
    assert len(streams) > 5_000


def test_large_effects_of_many_streams_are_committed_a_few_at_a_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(8)

    def enlarge(message: Message) -> dict[str, Any]:
        barrier.wait(FAIL_SAFE_S)  # so that all end at once
        return {"stream": message.stream, "n": 0, "blob": "x" * 2_000_000}

    fill(client, 16, 1)
    trips: list[int] = []
    send = Client.pipeline

    def weighed(self: Client, commands: Any, *more: Any) -> Any:
        trips.append(sum(len(arg) for command in commands for arg in command if isinstance(arg, str | bytes)))
        return send(self, commands, *more)

    monkeypatch.setattr(Client, Client.pipeline.__name__, weighed)
    with working(client, make(enlarge, pattern="s:*", order="stream"), policy=replace(QUICK, threads=8)):
        eventually(lambda: len(rows(client)) == 16)
    assert max(trips) < 9 << 20


@pytest.mark.parametrize(
    ("rules", "streams"),
    [(("-xack",), ()), (("resetkeys", "~s:*", "~millstream:*"), ()), (("resetkeys", "~out", "~millstream:*"), ("in",))],
)
def test_a_worker_that_cannot_commit_at_all_ends(client: Client, rules: Any, streams: Any) -> None:
    fill(client, 1, 1)
    options: dict[str, Any] = {} if streams else {"pattern": "s:*"}
    with Client(login(client, *rules)) as user, ending(AccessDenied, user, make(count, order="stream", **options)):
        pass
    client.execute("ACL", "DELUSER", "limited")


SHARED = r"workers of app\.handle own the streams of service"


def test_the_workers_of_a_service_belong_to_one_handler(client: Client) -> None:
    with working(client, make(count, announced="calls", order="stream")):
        eventually(lambda: client.execute("HGET", ServiceKeys("calls").meta, "handler") == b"app.handle")
        other = App("other")
        other.handler(announced="calls", order="stream", into="out", name="handle")(count)
        with ending(ConfigError, client, other.handlers["handle"], "w2", match=SHARED):
            pass


@pytest.mark.parametrize("options", [{"announced": "calls"}, {"pattern": "s:*"}])
def test_a_service_that_lost_its_keys_gets_its_streams_and_its_handler_back(
    client: Client, options: dict[str, Any]
) -> None:
    fill(client, 2, 1)
    keys = ServiceKeys("calls" if "announced" in options else SERVICE.service)
    for name in ("s:0", "s:1"):
        announce(client, keys.service, name)
    with working(client, make(count, order="stream", **options)):
        eventually(lambda: len(rows(client)) == 2)
        client.execute("DEL", keys.input, *client.execute("KEYS", f"{keys.base}:*"))
        fill(client, 2, 1, first=1)
        eventually(lambda: sum(map(len, rows(client).values())) == 4)
        eventually(lambda: client.execute("HLEN", keys.owners) == 2)
        eventually(lambda: client.execute("HGET", keys.meta, "handler") == b"app.handle")
        service = keys.service.removeprefix("millstream:")
        found = call("lease", "list", service, "--json", "--url", client.url).json_lines()
        assert [row["lag"] for row in found] == [0, 0]
        other = App("other")
        other.handler(announced=keys.service, order="stream", into="out", name="handle")(count)
        with ending(ConfigError, client, other.handlers["handle"], "w2", match=SHARED):
            pass


def test_a_stream_lease_that_moves_takes_over_nothing_from_a_newer_spark_run(client: Client) -> None:
    fill(client, 4, 1)
    handler = make(count, pattern="s:*", order="stream")
    names = [f"s:{s}" for s in range(4)]
    spark = CommitStore(client, app="app", handler="handle", into="out")
    with ending(StaleOwner, client, handler, "w1"), ending(StaleOwner, client, handler, "w2"):
        eventually(lambda: len(set(owners(client).values())) == 2)
        eventually(lambda: sum(map(len, rows(client).values())) == 4)  # they are at work on every stream
        spark = spark.with_token(spark.new_token(names))
        spark.begin_run(names)  # the first to notice releases its streams, and the other gets them
    spark.begin_run(names)
    assert [client.execute("HGET", HandlerKeys("app", "handle", name).meta, "owner") for name in names] == [None] * 4
    with working(client, handler, "w3"):  # one started after the run on Spark may take over
        fill(client, 4, 1, first=1)
        eventually(lambda: sum(map(len, rows(client).values())) == 8)
    check_order(client, 4, 2)


@pytest.mark.parametrize("options", [{"announced": "calls"}, {"pattern": "s:*"}])
def test_streams_on_all_nodes_of_a_cluster_stay_in_order_while_workers_come_and_go(options: dict[str, Any]) -> None:
    ran: dict[str, dict[tuple[int, int], None]] = defaultdict(dict)  # a run whose commit is refused is repeated

    def note(message: Message, state: State) -> None:
        state["count"] = state.get("count", 0) + 1
        ran[message.stream][int(message.fields["n"]), state["count"]] = None

    handler = make(note, order="stream", into=None, **options)
    with cluster() as deployment, Client(deployment.url) as client:
        fill(client, 12, 5)
        if "announced" in options:
            for number in range(12):
                announce(client, "calls", f"s:{number}")
        with working(client, handler, "w1"):
            eventually(lambda: sum(map(len, ran.values())) == 60)
            with working(client, handler, "w2"):
                shared = ServiceKeys("calls" if "announced" in options else SERVICE.service)
                eventually(lambda: len({one.split(b" ")[1] for one in client.execute("HVALS", shared.owners)}) == 2)
                fill(client, 12, 5, first=5)
                eventually(lambda: sum(map(len, ran.values())) == 120)
            fill(client, 12, 5, first=10)
            eventually(lambda: sum(map(len, ran.values())) == 180)
        assert all(node.call("DBSIZE") > 0 for node in deployment.nodes)
    found = {name: [*some] for name, some in ran.items()}
    assert found == {f"s:{number}": [(n, n + 1) for n in range(15)] for number in range(12)}


def test_streams_of_a_full_server_of_a_cluster_hold_up_no_others_and_run_once_it_has_room() -> None:
    ran: set[str] = set()
    handler = make(lambda message: ran.add(message.stream), pattern="s:*", order="stream", into=None)
    with cluster() as deployment, Client(deployment.url) as client:
        of_service = client.shard(SERVICE.meta).primary
        full = next(node for node in deployment.nodes if of_service is not None and node.port != of_service[1])
        names = [f"s:{number}" for number in range(24)]
        waiting = {name for name in names if (primary := client.shard(name).primary) and primary[1] == full.port}
        assert waiting.intersection(names[:12]), "some of the first streams are there"
        fill(client, 12, 1)
        full.call("CONFIG", "SET", "maxmemory", "1")
        with working(client, handler):
            eventually(lambda: ran == set(names[:12]) - waiting)
            client.pipeline([("XADD", name, "*", "n", 0) for name in names[12:] if name not in waiting])
            eventually(lambda: ran == set(names) - waiting)
            full.call("CONFIG", "SET", "maxmemory", "0")
            client.pipeline([("XADD", name, "*", "n", 0) for name in names[12:] if name in waiting])
            eventually(lambda: ran == set(names))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": "stream", "key": "k"}, 'order="stream" keeps whole streams in order'),
        ({"order": "stream", "partitions": 4}, "excludes partitions"),
        ({"order": "sideways"}, "order must be"),
        ({"announced": "calls"}, 'add order="stream"'),
        ({"announced": "no good", "order": "stream"}, "service name"),
        ({"announced": "calls", "pattern": "s:*", "order": "stream"}, "one of the three"),
    ],
)
def test_the_error_names_options_that_contradict_each_other(options: dict[str, Any], words: str) -> None:
    streams = () if {"pattern", "announced"} & options.keys() else ("in",)
    with pytest.raises(ConfigError, match=words.replace('"', ".")):
        App("app").handler(*streams, **options)(count)


def test_a_handler_of_lists_with_an_order_is_refused() -> None:
    def handle(messages: list[Message]) -> None:
        pass

    with pytest.raises(ConfigError, match="runs one message at a time"):
        App("app").handler("in", order="stream")(handle)
