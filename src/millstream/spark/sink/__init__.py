"""The `redis-streams` sink: writes batches of rows to streams exactly once, by two-phase commit.

Tasks stage their rows in keys beside each stream, invisible to readers. The committer closes the staged part of each
stream, so that it no longer expires, decides the batch in one atomic step, and only then moves the rows into the
streams. If it dies after the decision, the next run publishes the rest (roll-forward; Gray and Lamport, "Consensus on
Transaction Commit"). `docs/spark-sink.md` describes the protocol step by step.
"""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.spark.sink.manifest import StagedTask
    from millstream.spark.sink.publication import Publication
    from millstream.spark.sink.staging import Row, Stage, begin, token_of
    from millstream.spark.sink.write_options import WriteOptions
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.spark.sink.manifest": ("StagedTask",),
            "millstream.spark.sink.publication": ("Publication",),
            "millstream.spark.sink.staging": ("Row", "Stage", "begin", "token_of"),
            "millstream.spark.sink.write_options": ("WriteOptions",),
        },
    )

__all__ = ["Publication", "Row", "Stage", "StagedTask", "WriteOptions", "begin", "token_of"]
