"""What the planners of the Spark source plan, as the offsets at which a query goes on."""

from collections.abc import Mapping

from millstream.spark.source.batch_limits import Advance, BatchLimits
from millstream.spark.source.batch_planner import BatchPlanner
from millstream.spark.source.group_batch_planner import GroupBatchPlanner
from millstream.spark.source.group_offsets import GroupOffset
from millstream.spark.source.offsets import Offsets, Position


def planned_end(
    planner: BatchPlanner,
    start: Mapping[str, Position],
    *,
    limit: int | None = None,
    target: Mapping[str, Position] | None = None,
    may_delay: bool = False,
) -> Offsets:
    """Where the query goes on: at the end of the batch that begins at `start`, or at `start` itself, if nothing is new.

    Positions that come from no planner get a version of their own.
    """
    offsets = start if isinstance(start, Offsets) else Offsets(start)
    planned = planner.plan_next(offsets, BatchLimits(max_entries=limit, target=target, may_delay=may_delay))
    return planned.end if isinstance(planned, Advance) else offsets


def planned_group_end(
    planner: GroupBatchPlanner,
    start: GroupOffset,
    *,
    limit: int | None,
    target: Mapping[str, Position] | None = None,
) -> GroupOffset:
    """The same for a query that shares a group."""
    planned = planner.plan_next(start, BatchLimits(max_entries=limit, target=target))
    return planned.end if isinstance(planned, Advance) else start
