"""Every operation of a Spark query that reads streams as a log, for the tests of access rights."""

from contextlib import closing

from millstream.redis_client.client import Client
from millstream.spark.source.batch_planner import BatchPlanner
from millstream.spark.source.options import parse
from millstream.spark.source.partition_reader import PartitionReader
from millstream.spark.source.progress_group import ProgressGroup
from tests.support.planning import planned_end
from tests.support.reading import as_planned, by_stream


def read_as_log(url: str, admin: Client) -> None:
    """Two batches: one cut by a limit, and the rest; on one of two streams the group of its progress exists."""
    admin.pipeline([("XADD", "orders", "*", "n", n) for n in range(9)])
    admin.execute("XADD", "orders:2", "*", "n", 1)
    admin.execute("XGROUP", "CREATE", "orders", "progress", 0)
    options = parse({"url": url, "subscribePattern": "orders*", "startingOffsets": "earliest"}, {})
    with closing(Client(url)) as client:
        planner, lag = BatchPlanner(client, options, cores=2), ProgressGroup(client, "progress")
        start = planner.starting_offsets("latest")
        lag.publish(start)
        middle = planned_end(planner, start, limit=4)
        end = planned_end(planner, middle)
        for at, until in ((start, middle), (middle, end)):
            for parts in planner.plan_tasks(at, until):
                reading = PartitionReader(client, as_planned(parts), limit_ms=0, fail_on_data_loss=True)
                assert sum(len(entries) for runs in reading.batches(by_stream) for _, entries in runs)
            lag.publish(until)
