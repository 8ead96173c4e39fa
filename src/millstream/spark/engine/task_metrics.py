"""TaskMetrics: the counters of a task per stream, and their totals over jobs and batches."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from millstream.model import EntryId
from millstream.observability.failure_log import FailureLog

COUNTERS = ("messages", "committed", "dead", "retries", "refused", "deferred", "limited", "head_of_line_avoided")
"""The counters of a task on each stream."""

METRICS_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("last_id", pa.string()),
        *((name, pa.int64()) for name in COUNTERS),
        ("has_queues", pa.bool_()),
        ("failures", pa.binary()),
        ("causes", pa.string()),
        ("trip", pa.string()),
    ]
)


@dataclass(slots=True)
class TaskMetrics:
    """The counters of a task on one stream; `last_id` is the greatest entry id it read."""

    last_id: EntryId
    messages: int = 0
    committed: int = 0
    dead: int = 0
    retries: int = 0
    refused: int = 0
    deferred: int = 0
    limited: int = 0
    head_of_line_avoided: int = 0


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Totals over all tasks of a job: entries read, committed, dead, deferred (`deferred`); retries; refused commits;
    runs that the limit of the handler refused (`limited`); entries committed behind a deferred one of another key
    (`head_of_line_avoided`).
    """

    handler: str
    messages: int
    committed: int
    dead: int
    retries: int
    refused: int
    deferred: int
    limited: int
    head_of_line_avoided: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class BatchTotals(Totals):
    """Totals of one finished batch."""

    batch: int


def log_failures(failures: FailureLog, rows: Iterable[Mapping[str, Any]]) -> None:
    """Log, on the driver, the failures that the tasks recorded: a task's own log is in its executor, or nowhere."""
    for row in rows:
        if row["failures"]:
            failures.merge(bytes(row["failures"]))


def sum_counters(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Sum the counters of all rows that tasks report."""
    totals = dict.fromkeys(COUNTERS, 0)
    for row in rows:
        for name in COUNTERS:
            totals[name] += row[name]
    return totals
