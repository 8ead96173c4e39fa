"""Commits of a worker that Redis executes while the worker makes the next one."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from millstream.delivery.keyed_stream import KeyLease
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import AccessDenied, WrongType
from millstream.handlers.attempt import NO_EFFECTS, DeadLettered, Done, Outcome, RetryLater
from millstream.handlers.encoding import pack_output
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.proxy import Proxy
from millstream.worker import WorkerPolicy
from millstream.worker.completion_queue import FinishedRun
from millstream.worker.context import WorkerContext
from millstream.worker.in_flight import InFlight
from millstream.worker.settling.committer import Committer
from millstream.worker.settling.key_committer import KeyCommitter
from tests.support.keyed_fixtures import keyed, lease_one, publish
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, double, fill, make, make_context

pytestmark = [pytest.mark.worker]


class Bench:
    """A committer, and entries of streams that were fetched and are in flight."""

    def __init__(self, client: Client, *streams: str, batch: int = 256) -> None:
        self.found: list[Delivery] = []
        self.in_flight = InFlight(WorkerPolicy(batch=batch), 1)
        for name in streams:
            stream = ReliableStream(client, name, app="app", handler="handle", consumer="w", into="out")
            stream.join()
            self.found += stream.fetch(count=100)
        self.in_flight.add(self.found, 0)
        self.context = make_context(client, make(double), in_flight=self.in_flight)
        self.committer = Committer(self.context, release=lambda deliveries: None)

    @property
    def committed(self) -> int:
        return self.context.loop_metrics.committed

    @property
    def refused(self) -> int:
        return self.context.loop_metrics.refused


def ran(deliveries: Sequence[Delivery], outcome: Outcome = NO_EFFECTS) -> list[FinishedRun]:
    return [((one,), outcome) for one in deliveries]


def with_output(deliveries: Sequence[Delivery]) -> list[FinishedRun]:
    return [((one,), Done([pack_output({"n": 1})], b"")) for one in deliveries]


@pytest.fixture
def proxy(millstream_server: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(millstream_server.port) as proxy:
        yield proxy


@pytest.fixture
def slow(proxy: Proxy) -> Iterator[Client]:
    """A client whose calls pass through the proxy."""
    with Client(proxy.url) as slow:
        yield slow


@contextmanager
def frozen(proxy: Proxy) -> Iterator[None]:
    """Redis answers nothing during the block."""
    proxy.freeze()
    try:
        yield
    finally:
        proxy.resume()


def test_runs_are_settled_while_redis_executes_the_commit_before(client: Client, proxy: Proxy, slow: Client) -> None:
    fill(client, 4)
    bench = Bench(slow, "in")
    first, second = bench.found[:2], bench.found[2:]
    with frozen(proxy):
        bench.committer.settle(ran(first))  # does not wait
        assert (bench.committed, len(bench.in_flight)) == (0, 4)
        assert [one.committing for one in bench.found] == [True, True, False, False]
        thread = threading.Thread(target=bench.committer.settle, args=(ran(second),))
        thread.start()
    thread.join(FAIL_SAFE_S)
    assert (bench.committed, len(bench.in_flight)) == (2, 2)
    bench.committer.finish()
    assert (bench.committed, bench.refused, len(bench.in_flight)) == (4, 0, 0)
    assert client.execute("XPENDING", "in", KEYS.group)[0] == 0
    assert first[0].stream.commit_count == 2, "each is reason for a checkpoint"


def test_claims_on_other_streams_are_renewed_while_one_stream_cannot_be_committed(
    client: Client, proxy: Proxy, slow: Client
) -> None:
    client.pipeline([("XADD", stream, "*", "n", "1") for stream in ("a", "b")])
    bench = Bench(slow, "a", "b")
    one, other = bench.found
    with frozen(proxy):
        thread = threading.Thread(target=bench.committer.settle, args=(ran(bench.found),))
        thread.start()
        eventually(lambda: one.committing)
        time.sleep(0.05)  # a commit that is not sent yet must not count as under way
        assert not other.committing
    thread.join(FAIL_SAFE_S)
    bench.committer.finish()
    assert (bench.committed, len(bench.in_flight)) == (2, 0)


@pytest.mark.parametrize("cut", [Proxy.cut_before, Proxy.cut_after])
def test_a_commit_whose_connection_breaks_is_repeated_before_the_next_and_counts_once(
    client: Client, proxy: Proxy, slow: Client, cut: Callable[..., None]
) -> None:
    fill(client, 5)
    bench = Bench(slow, "in")
    bench.committer.settle(ran(bench.found[:1]))  # from now on the server knows the script
    bench.committer.finish()
    cut(proxy, "EVALSHA")
    bench.committer.settle(with_output(bench.found[1:3]))
    bench.committer.settle(with_output(bench.found[3:]))
    bench.committer.finish()
    assert (bench.committed, bench.refused, len(bench.in_flight)) == (5, 0, 0)
    assert client.execute("XLEN", "out") == 4
    assert client.execute("XPENDING", "in", KEYS.group)[0] == 0


def test_a_worker_goes_on_if_redis_lost_its_progress_under_the_commit_and_another_worker_began_anew(
    client: Client,
) -> None:
    fill(client, 4)
    bench = Bench(client, "in")
    bench.committer.settle(ran(bench.found[:1]))
    bench.committer.finish()
    client.execute("FLUSHALL")
    other = ReliableStream(client, "in", app="app", handler="handle", consumer="other")
    other.join()  # the token of the bench is older
    bench.committer.settle(ran(bench.found[1:3]))
    bench.committer.settle(ran(bench.found[3:]))
    bench.committer.finish()
    assert (bench.committed, bench.refused, len(bench.in_flight)) == (1, 3, 0)
    assert bench.found[0].stream.token == other.token


def test_a_commit_that_redis_refuses_for_good_is_not_repeated(client: Client, clerk: Client) -> None:
    fill(client, 2)
    bench = Bench(clerk, "in")
    client.execute("ACL", "SETUSER", "clerk", "-xack")
    bench.committer.settle(with_output(bench.found[:1]))
    with pytest.raises(AccessDenied):
        bench.committer.settle(with_output(bench.found[1:]))
    assert client.execute("XLEN", "out") == 1, "Redis undoes nothing of a script"


def on_two_streams(client: Client, keys: str) -> tuple[KeyCommitter, WorkerContext, list[KeyLease]]:
    """The committer of a worker that has leased a key on each of two streams, with these entries."""
    leases = []
    for name in ("in", "in2"):
        publish(client, keys, stream=name)
        stream = keyed(client, stream=name)
        stream.enqueue_new(count=10, max_pending=10)
        leases.append(lease_one(stream))
    context = make_context(client, make(double, key="k", pattern="in*"))
    context.in_flight.add_leases(leases, 0)
    return KeyCommitter(context, release=lambda released: None, on_lease_end=lambda stream: None), context, leases


def refuse() -> None:
    raise AccessDenied("rights were taken")


def test_commits_of_several_streams_that_redis_refuses_for_good_are_not_repeated(client: Client, clerk: Client) -> None:
    committer, _, leases = on_two_streams(clerk, "A")
    client.execute("ACL", "SETUSER", "clerk", "-xack")
    with pytest.raises(AccessDenied):
        committer.settle(with_output([lease.entries[0] for lease in leases]))
    assert client.execute("XLEN", "out") == 2, "one of each, though Redis undoes nothing of a script"


def test_a_dead_letter_that_redis_has_written_is_reported_though_the_committer_fails_before_it_has_read_the_reply(
    client: Client, clerk: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, 3)
    bench = Bench(clerk, "in", batch=1)
    bench.committer.settle(ran(bench.found[:1]))  # from now on the server knows the script
    bench.committer.finish()
    bench.committer.settle(ran(bench.found[1:2], DeadLettered("failed", "ValueError: the bank refuses")))
    eventually(lambda: client.execute("XLEN", KEYS.dead_letters) == 1)
    client.execute("ACL", "SETUSER", "clerk", "-hincrby", "-hset", "-hget")
    bench.in_flight.completions.put(((bench.found[2],), RetryLater(10_000.0, "ValueError: not yet")))
    with pytest.raises(AccessDenied):
        bench.committer.run()
    assert "dead letter (failed, attempt 1 of 3): message " in caplog.text
    assert "the bank refuses; see: millstream dlq list" in caplog.text
    assert (bench.committed, bench.in_flight.deliveries) == (2, bench.found[2:])


def test_the_error_of_a_committer_is_raised_also_if_the_reply_to_its_last_commit_is_lost(
    client: Client, proxy: Proxy, slow: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, 2)
    bench = Bench(slow, "in", batch=1)
    bench.committer.settle(ran(bench.found[:1]))
    bench.committer.finish()
    proxy.cut_before("EVALSHA")
    bench.committer.settle(ran(bench.found[1:]))

    monkeypatch.setattr(bench.committer, "_run", refuse)
    with pytest.raises(AccessDenied):
        bench.committer.run()
    assert bench.committed == 1, "it is not repeated: other workers get the message"


def test_the_error_of_a_committer_is_raised_also_if_its_last_commit_cannot_be_noted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, 1)
    bench = Bench(client, "in", batch=1)
    bench.committer.settle(ran(bench.found))

    monkeypatch.setattr(bench.committer, "_run", refuse)
    monkeypatch.setattr(bench.context.loop_metrics, "count_committed", None)
    with pytest.raises(AccessDenied):
        bench.committer.run()


def test_dead_letters_of_one_stream_are_reported_though_the_settlement_of_another_one_fails(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    committer, context, leases = on_two_streams(client, "AA")
    client.execute("SET", KEYS.backoff, "no sorted set")  # so the release of the first one is refused
    dead = DeadLettered("failed", "ValueError: the bank refuses")
    outcomes: list[Outcome] = [dead, RetryLater(10_000.0, "ValueError: not yet")]
    with pytest.raises(WrongType):
        committer.settle(
            [run for lease in leases for run in zip([(one,) for one in lease.entries], outcomes, strict=True)]
        )
    assert caplog.text.count("the bank refuses; see: millstream dlq list") == 2
    assert context.loop_metrics.committed == 2


def test_a_commit_is_noted_while_only_failures_follow(client: Client) -> None:
    fill(client, 2)
    bench = Bench(client, "in")
    bench.committer.settle(ran(bench.found[:1]))
    bench.committer.settle(ran(bench.found[1:], RetryLater(0.0, "again")))
    assert (bench.committed, len(bench.in_flight)) == (1, 1)


def test_another_call_of_the_worker_leaves_the_commit_under_way_its_reply(client: Client) -> None:
    fill(client, 2)
    bench = Bench(client, "in")
    bench.committer.settle(ran(bench.found))
    assert client.execute("ECHO", "between") == b"between"
    bench.committer.finish()
    assert (bench.committed, bench.refused, len(bench.in_flight)) == (2, 0, 0)


def test_effects_of_a_commit_under_way_for_which_redis_has_no_memory_are_postponed(client: Client) -> None:
    fill(client, 4)
    bench = Bench(client, "in")
    settled: list[int] = []
    bench.context.loop_metrics.on_runs_settled = settled.append  # type: ignore[method-assign, assignment]
    plain, full = bench.found[:2], bench.found[2:]
    client.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        bench.committer.settle([*ran(plain), *with_output(full)])
        bench.committer.finish()
        assert (bench.committed, [one.committing for one in full]) == (2, [False, False])
        assert bench.committer._has_postponed
    finally:
        client.execute("CONFIG", "SET", "maxmemory", "0")
    assert sum(settled) == 4, "those that were postponed are no longer in progress"
    bench.committer._retry_postponed()
    assert sum(settled) == 4
    assert (bench.committed, bench.refused, len(bench.in_flight)) == (4, 0, 0)
    assert client.execute("XLEN", "out") == 2


def test_the_committer_ends_without_a_commit_under_way(client: Client) -> None:
    fill(client, 4)
    bench = Bench(client, "in")
    for run in ran(bench.found):
        bench.in_flight.completions.put(run)
    bench.in_flight.completions.close()
    bench.committer.run()
    assert (bench.committed, len(bench.in_flight)) == (4, 0)


def test_a_commit_is_noted_though_no_further_outcome_arrives(client: Client) -> None:
    fill(client, 2)
    bench = Bench(client, "in")
    thread = threading.Thread(target=bench.committer.run)
    thread.start()
    for run in ran(bench.found):
        bench.in_flight.completions.put(run)
    eventually(lambda: bench.committed == 2)
    bench.in_flight.completions.close()
    thread.join(FAIL_SAFE_S)


def test_a_run_counts_as_in_progress_until_its_commit_is_answered(client: Client, proxy: Proxy, slow: Client) -> None:
    fill(client, 2)
    bench = Bench(slow, "in")
    settled: list[int] = []
    bench.context.loop_metrics.on_runs_settled = settled.append  # type: ignore[method-assign, assignment]
    with frozen(proxy):
        bench.committer.settle(ran(bench.found))
        assert sum(settled) == 0
    bench.committer.finish()
    assert sum(settled) == 2
