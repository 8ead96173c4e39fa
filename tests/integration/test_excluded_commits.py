"""Commits on a stream that breaks while its messages run, beside others: the worker leaves it out, and keeps the others."""

from collections.abc import Sequence

import pytest

from millstream.delivery.keyed_stream import KeyLease
from millstream.errors import AccessDenied, ConfigError, MillstreamError, WrongType
from millstream.handlers.attempt import DeadLettered, Done, Outcome, RetryLater
from millstream.handlers.encoding import pack_output
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.worker.completion_queue import FinishedRun
from millstream.worker.settling.key_committer import KeyCommitter
from tests.support.keyed_fixtures import KEYS, keyed, lease_one, publish
from tests.support.workers import double, make, make_context

pytestmark = [pytest.mark.worker]

DONE = Done([pack_output({"n": 1})], b"")
RETRY = RetryLater(10_000.0, "ValueError: the bank refuses")
DEAD = DeadLettered("failed", "ValueError: the bank refuses")


class Bench:
    """A committer of a handler of many streams, with a key of each of `in`, `in2` and `in3` in flight."""

    def __init__(self, client: Client, keys: str = "A") -> None:
        self.leases: list[KeyLease] = []
        self.excluded: list[MillstreamError] = []
        for name in ("in", "in2", "in3"):
            publish(client, keys, stream=name)
            stream = keyed(client, stream=name)
            stream.on_stream_error = self.excluded.append
            stream.enqueue_new(count=10, max_pending=10)
            self.leases.append(lease_one(stream))
        self.context = make_context(client, make(double, key="k", pattern="in*"))
        self.context.in_flight.add_leases(self.leases, 0)
        self.committer = KeyCommitter(self.context, release=lambda released: None, on_lease_end=lambda stream: None)

    def settle(self, outcome: Outcome, leases: Sequence[KeyLease], number: int = 0) -> None:
        """Settle the run of one message of each of these leases."""
        runs: list[FinishedRun] = []
        for lease in leases:
            one = lease.entries[number]
            if one is lease.entries[-1]:
                lease.last_run = one
            runs.append(((one,), outcome))
        self.committer.settle(runs)

    @property
    def committed(self) -> int:
        return self.context.loop_metrics.committed


def overwrite(client: Client) -> None:
    client.execute("DEL", "in")
    client.execute("SET", "in", "no stream")


def take_away(client: Client, *keys: str) -> None:
    client.execute("ACL", "SETUSER", "clerk", "resetkeys", *(f"~{key}" for key in keys))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("outcome", [DONE, DEAD, RETRY])
def test_a_stream_that_breaks_while_its_message_runs_is_left_out_and_the_others_are_committed(
    client: Client, caplog: pytest.LogCaptureFixture, outcome: Outcome, count: int
) -> None:
    bench = Bench(client)
    broken = bench.leases[0].stream
    overwrite(client)
    bench.settle(outcome, bench.leases[:count])
    assert [type(one) for one in bench.excluded] == [WrongType]
    assert [one.stream.leaving for one in bench.leases] == [True, False, False]
    assert bench.context.in_flight.leases == set(bench.leases[count:]), "nothing waits for it"
    assert bench.committed == (count - 1 if outcome is not RETRY else 0)
    assert "1 messages of in are not committed: this worker leaves out the stream" in caplog.text
    missed = (
        f"attempt 1 of 3 failed on message 1-0 of {broken.stream}, key A: ValueError: the bank refuses; this worker"
    )
    assert (missed in caplog.text) == (outcome is not DONE)


def test_a_stream_that_the_user_may_not_access_any_more_is_left_out_and_nothing_later_of_it_is_committed(
    client: Client, clerk: Client
) -> None:
    bench = Bench(clerk, "AA")
    take_away(client, "out", "in2", "in3", *(f"{HandlerKeys('app', 'handle', name).base}*" for name in ("in2", "in3")))
    bench.settle(DONE, bench.leases)
    assert ([type(one) for one in bench.excluded], bench.committed) == ([AccessDenied], 2)
    client.execute("ACL", "SETUSER", "clerk", "~*")
    bench.settle(DONE, bench.leases, 1)
    assert bench.committed == 4, "the second message of its key must not come before the first one"
    assert client.execute("XPENDING", "in", KEYS.group)[0] == 2
    assert bench.context.in_flight.leases == set()


def test_a_stream_is_left_out_whose_key_cannot_be_released_and_its_dead_letter_is_reported_once(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(client, "AA")
    client.execute("SET", KEYS.backoff, "no sorted set")
    runs: list[FinishedRun] = [((lease.entries[0],), DEAD) for lease in bench.leases]
    for lease in bench.leases:
        lease.last_run = lease.entries[1]
        runs.append(((lease.entries[1],), RETRY))
    bench.committer.settle(runs)
    assert ([type(one) for one in bench.excluded], bench.committed) == ([WrongType], 3)
    assert caplog.text.count("dead letter (failed, attempt 1 of 3): message 1-0 of in,") == 1
    assert caplog.text.count("failed on message 1-0 of in,") == 0, "its outcome is written"
    assert caplog.text.count("failed on message 2-0 of in,") == 1
    assert bench.context.in_flight.leases == set()


def test_effects_that_wait_for_memory_are_dropped_with_their_stream(client: Client) -> None:
    bench = Bench(client)
    publish(client, "B", first=2)
    stream = bench.leases[0].stream
    stream.enqueue_new(count=10, max_pending=10)
    other = lease_one(stream)
    bench.context.in_flight.add_leases([other], 0)
    client.execute("SET", KEYS.backoff, "no sorted set")
    bench.leases[0].last_run, other.last_run = bench.leases[0].entries[0], other.entries[0]
    client.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        bench.committer.settle([(bench.leases[0].entries, DONE), (other.entries, RETRY)])
    finally:
        client.execute("CONFIG", "SET", "maxmemory", "0")
    assert [type(one) for one in bench.excluded] == [WrongType]
    assert not bench.committer._has_postponed
    assert bench.context.in_flight.leases == set(bench.leases[1:])


def test_an_output_stream_that_is_none_ends_the_worker_as_no_stream_can_be_committed(client: Client) -> None:
    bench = Bench(client)
    client.execute("SET", "out", "no stream")
    with pytest.raises(ConfigError, match="cannot write its outputs to 'out', which holds a string"):
        bench.settle(DONE, bench.leases)
    assert bench.excluded == []


def test_an_output_stream_that_the_user_may_not_write_any_more_ends_the_worker(client: Client, clerk: Client) -> None:
    bench = Bench(clerk)
    take_away(client, "in*", "millstream:*")
    with pytest.raises(AccessDenied):
        bench.settle(DONE, bench.leases)
    assert bench.excluded == []
