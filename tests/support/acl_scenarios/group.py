"""Every operation of a Spark query with `readAs=group` in Redis, for the tests of access rights."""

from contextlib import ExitStack

from millstream.redis_client.client import Client
from millstream.spark.source.group_batch_planner import GroupBatchPlanner
from millstream.spark.source.group_offsets import BEFORE_FIRST_BATCH
from millstream.spark.source.group_partition_reader import GroupPartitionReader
from millstream.spark.source.options import parse
from tests.support.planning import planned_group_end
from tests.support.reading import by_stream


def take_from_group(url: str, admin: Client) -> None:
    """Three runs: two with the same checkpoint, one after the other, and one with another checkpoint."""
    ids = [admin.execute("XADD", "orders", "*", "n", n) for n in range(9)]
    admin.execute("XADD", "orders:2", "*", "n", 1)
    admin.execute("XGROUP", "CREATE", "orders", "g", 0)
    admin.execute("XREADGROUP", "GROUP", "g", "dead", "COUNT", 3, "STREAMS", "orders", ">")
    admin.execute("XCLAIM", "orders", "g", "dead", 0, *ids[:3], "IDLE", 600_000, "JUSTID")
    admin.execute("XDEL", "orders", ids[0])
    given = {"url": url, "subscribePattern": "orders*", "readAs": "group", "group": "g", "startingOffsets": "earliest"}
    options = parse({**given, "maxOffsetsPerTrigger": "4", "failOnDataLoss": "false"}, {})
    assert options.sharing is not None
    with Client(url) as client, ExitStack() as stack:
        first, reader, other = (GroupBatchPlanner(client, options, options.sharing, cores=2) for _ in range(3))
        for one in (first, reader, other):
            stack.callback(one.close)
        end = planned_group_end(first, BEFORE_FIRST_BATCH, limit=4)
        assert sum(end.counts.values()) == 4
        (portions,) = reader.plan_tasks(BEFORE_FIRST_BATCH, end)
        reading = GroupPartitionReader(client, portions, limit_ms=0, fail_on_data_loss=True)
        assert sum(len(entries) for runs in reading.batches(by_stream) for _, entries in runs) == 4
        assert sum(planned_group_end(reader, end, limit=4).counts.values()) == 4
        assert sum(planned_group_end(other, BEFORE_FIRST_BATCH, limit=4).counts.values()) == 4
