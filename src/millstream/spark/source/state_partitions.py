"""The tasks of a read of states, and their rows."""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from millstream.admin.inspection import decode_version_and_state
from millstream.admin.state_scan import StateHash, StoredState
from millstream.errors import DecodeError
from millstream.handlers.upcasting import parse_version
from millstream.model import ZERO_ID
from millstream.redis_client.escaping import json_value
from millstream.spark.source.offset_ranges import OffsetRange, TaskSizing, assign
from millstream.spark.source.state_options import StateOptions
from millstream.spark.source.subscription import is_text
from millstream.spark.versions import arrow_schema

logger = logging.getLogger(__name__)


def assign_hashes(hashes: Sequence[StateHash], *, min_partitions: int | None, cores: int) -> list[list[str]]:
    """Assign the streams to tasks of about as many states. The states of one stream are read by one task.

    Leaves out streams without a state, and with a warning those whose names are not UTF-8 text: Spark has no string for
    them.
    """
    sizes = {one.keys.stream: one.count for one in hashes if one.count}
    if unusable := [name for name in sizes if not is_text(name)]:
        logger.warning(
            "%d streams are left out, as their names are not UTF-8 text: %r, ...", len(unusable), unusable[0]
        )
    # As ranges of so many entries: tasks of even size are the same for both.
    ranges = [OffsetRange(name, ZERO_ID, ZERO_ID, size, size) for name, size in sizes.items() if is_text(name)]
    total, sizing = sum(one.size for one in ranges), TaskSizing(min_partitions=min_partitions, cores=cores)
    return [[one.stream for one in task] for task in assign(ranges, sizing.task_count(total), sizing.task_size(total))]


def record_batch(page: Sequence[StoredState], options: StateOptions, schema: StructType) -> pa.RecordBatch:
    """The rows of a page, with the columns of `schema`. Raises DecodeError for a damaged state with mode=failfast."""
    arrow = arrow_schema(schema)
    columns: dict[str, Callable[[], list[Any]]] = {
        "stream": lambda: [one.stream for one in page],
        "key": lambda: [one.key for one in page],
        "state": lambda: [state for _, state in decoded],
        "version": lambda: [version for version, _ in decoded],
    }
    decode = _version_and_json if options.state_as == "json" and "state" in schema.names else _version_and_bytes
    decoded = [decode(one, options) for one in page]
    arrays = [pa.array(columns[one.name](), type=one.type) for one in arrow]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def _version_and_json(one: StoredState, options: StateOptions) -> tuple[int | None, str | None]:
    try:
        version, state = decode_version_and_state(one.key, one.blob)
    except DecodeError:
        if options.failfast:
            raise
        return None, None
    return version, json.dumps(json_value(state), ensure_ascii=False, separators=(",", ":"))


def _version_and_bytes(one: StoredState, options: StateOptions) -> tuple[int | None, bytes]:
    try:
        return parse_version(one.blob), one.blob
    except ValueError as error:
        if options.failfast:
            raise DecodeError(f"the state of {one.key!r} is damaged ({error})") from error
        return None, one.blob
