"""Keys that a worker has leased and does not begin: other workers get them, whatever happens to one stream."""

import logging

import pytest

from millstream.delivery.keyed_stream import KeyLease
from millstream.errors import WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.worker.ordering.by_key import ByKey
from millstream.worker.settling.key_lease_renewal import KeyLeaseRenewer
from tests.support.keyed_fixtures import MANY, keyed, lease_keys, lease_one, publish
from tests.support.workers import make, make_context

pytestmark = [pytest.mark.worker, pytest.mark.keys]


class Leased:
    """A worker that has leased a key of each of two streams, whose entries wait in its buffer."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.context = make_context(client, make(lambda message: None, key="k"))
        self.in_flight = self.context.in_flight
        self.leases = [self._lease(stream) for stream in ("broken", "fine")]
        self.in_flight.add_leases(self.leases, 0.0)

    def _lease(self, stream: str) -> KeyLease:
        publish(self.client, "A", stream=stream)
        worker = keyed(self.client, "w", stream)
        worker.enqueue_new(count=10, max_pending=MANY)
        return lease_one(worker)

    def break_first(self) -> None:
        """Make the leases of the first stream unreadable."""
        self.client.execute("SET", HandlerKeys("app", "handle", "broken").leases, "text")

    def leasable(self) -> int:
        """How many keys of the second stream another worker can lease."""
        return len(lease_keys(keyed(self.client, "w2", "fine")).leases)


@pytest.fixture
def leased(client: Client) -> Leased:
    return Leased(client)


def test_a_stop_releases_the_keys_of_other_streams_if_one_stream_is_broken(
    leased: Leased, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    ordering = ByKey(leased.context)
    leased.break_first()
    ordering.release(leased.in_flight.remove_waiting())
    ordering.close()
    assert leased.leasable() == 1
    assert [record.message for record in caplog.records if "cannot release 1 messages" in record.message]
    assert leased.in_flight.leases == set()


def test_a_stop_leaves_a_key_leased_that_still_runs(leased: Leased) -> None:
    ordering = ByKey(leased.context)
    running = leased.leases[1].entries[0]
    leased.in_flight.start(running, 0.0)
    ordering.release([*leased.in_flight.remove_waiting(), running])
    ordering.close()
    assert leased.leasable() == 0
    assert leased.in_flight.leases == {leased.leases[1]}


def test_a_surplus_on_a_broken_stream_excludes_that_stream_and_is_released_on_the_others(leased: Leased) -> None:
    broken = leased.leases[0].stream
    excluded: list[Exception] = []
    broken.on_stream_error = excluded.append
    leased.break_first()
    leased.in_flight.close_gate()
    KeyLeaseRenewer(leased.context).release_surplus()
    assert [type(one) for one in excluded] == [WrongType]
    assert broken.leaving
    assert leased.leasable() == 1


def test_an_error_of_a_surplus_ends_the_worker_where_no_stream_can_be_excluded(leased: Leased) -> None:
    leased.break_first()
    leased.in_flight.close_gate()
    with pytest.raises(WrongType):
        KeyLeaseRenewer(leased.context).release_surplus()
