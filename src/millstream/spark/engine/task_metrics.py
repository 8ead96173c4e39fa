"""What tasks count, and what the jobs and batches that they belong to did in all."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from millstream.model import EntryId

if TYPE_CHECKING:
    from pyspark.sql import Row

COUNTED = ("messages", "committed", "dead", "retries", "refused", "aside")
"""What a task counts on each stream."""

TALLY_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("last_id", pa.string()),
        *((name, pa.int64()) for name in COUNTED),
        ("lines", pa.bool_()),
    ]
)


@dataclass(slots=True)
class TaskMetrics:
    """What a task did on one stream."""

    last_id: EntryId
    messages: int = 0
    committed: int = 0
    dead: int = 0
    retries: int = 0
    refused: int = 0
    aside: int = 0


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What all tasks of a job did: entries read, committed, dead, set aside; retries, refused commits; how long it took."""

    handler: str
    messages: int
    committed: int
    dead: int
    retries: int
    refused: int
    aside: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class BatchTotals(Totals):
    """What one finished batch did."""

    batch: int


def sums(rows: "Iterable[Row]") -> dict[str, int]:
    """What is counted, over all rows that tasks report."""
    totals = dict.fromkeys(COUNTED, 0)
    for row in rows:
        for name in COUNTED:
            totals[name] += row[name]
    return totals
