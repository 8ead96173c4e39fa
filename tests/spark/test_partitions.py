"""A handler that reads partitions, on Spark, while there come to be more of them."""

from collections import defaultdict
from typing import Any

import pytest

from millstream import App, Message, State
from millstream.partitions.partitioned_producer import PartitionedProducer
from millstream.partitions.partitions import Partitions
from tests.support.pipelines import Pipelines
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.keys]

KEYS = [f"k{n}" for n in range(20)]


def count(message: Message, state: State) -> dict[str, Any]:
    """The number of each message of a key, beside how many have come before it."""
    state["count"] = state.get("count", 0) + 1
    return {"k": message.text("k"), "n": message.text("n"), "count": state["count"]}


def test_keys_keep_their_order_and_state_while_partitions_are_added(pipelines: Pipelines) -> None:
    app = App("app")
    app.handler("orders", partitions=2, key="k", into="out", name="count")(count)
    client = pipelines.client
    producer = PartitionedProducer(client, "orders", key="k", partitions=2)
    producer.publish_many({"k": key, "n": n} for n in range(1, 6) for key in KEYS)
    with pipelines.running(app):
        eventually(lambda: client.execute("XLEN", "out") > 0, "the first output")
        Partitions(client, "orders").grow(4)
        producer.publish_many({"k": key, "n": n} for n in range(6, 11) for key in KEYS)
        eventually(lambda: client.execute("XLEN", "out") == 200, "all outputs")
    found = defaultdict(list)
    for _, fields in pipelines.entries("out"):
        found[fields["k"]].append((int(fields["n"]), int(fields["count"])))
    assert found == {key: [(n, n) for n in range(1, 11)] for key in KEYS}
