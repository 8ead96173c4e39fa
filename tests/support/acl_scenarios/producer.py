"""Every operation of a producer, for the tests of access rights."""

import pytest

from millstream.delivery.delayed_messages import DelayedMessages
from millstream.errors import NotReplicated
from millstream.partitions.partitioned_producer import PartitionedProducer
from millstream.producer.producer import Producer
from millstream.producer.session import PUBLISH
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import StreamKeys
from tests.support.partition_fixtures import BASE, growth_killed_after

LETTERS = "ABCDEFGH"


def produce(url: str, admin: Client) -> None:
    """Every operation of a publishing program and of `millstream publish`."""
    with Client(url) as client, Producer(client, capacity=100) as producer:
        first = producer.publish("orders", {"n": 1}, dedupe_id="1")
        assert producer.publish("orders", {"n": 1}, dedupe_id="1") == first
        with pytest.raises(NotReplicated):
            producer.publish("orders", {"n": 2}, replicas=1, timeout_ms=1)
        delayed = DelayedMessages(client)
        later = producer.publish("orders", {"n": 3}, delay_ms=60_000)
        assert delayed.count("orders") == 1
        assert delayed.find("orders")[0].id == later
        assert delayed.cancel("orders", [later]) == 1
        names = StreamKeys("orders")
        batch = (
            PUBLISH,
            ("orders", names.producer("p"), names.due, names.delayed),
            (1, "", "", "", 0, "", 1, 1, "n", "4"),
        )
        assert client.script(*batch) == client.script(*batch)  # repeated, as if the first reply was lost
    with PartitionedProducer(url, BASE, key="k", partitions=2) as spreading:
        spreading.publish({"k": "A"}, dedupe_id="1")
        assert growth_killed_after(admin, 1, 64)
        spreading.publish_many([{"k": letter} for letter in LETTERS], dedupe_ids=list(LETTERS))
        spreading.publish_many([{"k": letter} for letter in LETTERS], dedupe_ids=list(LETTERS))
