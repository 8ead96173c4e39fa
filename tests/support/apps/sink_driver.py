"""A driver that copies two streams to streams by a column in one query, and begins again whenever that fails.

It reads `in` by offsets, and shares the group `g` of `shared`. Arguments: URL, checkpoint folder, master, most entries of a
stream in a batch. It ends when all that was there is copied.
"""

import os
import sys

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from millstream.spark.run.session import open_session
from tests.support.apps.sink_source import DRIVER, DeadlySource
from tests.support.triggers import run_to_end


def main(url: str, checkpoint: str, master: str, most: str) -> None:
    """Run to the end."""
    DRIVER.write_text(str(os.getpid()))
    spark = open_session("sink", master=master, conf={})
    spark.dataSource.register(DeadlySource)

    def rows(stream: str, **options: str) -> DataFrame:
        reader = spark.readStream.format("deadly-streams").options(url=url, subscribe=stream, **options)
        frame = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=most).schema("n int").load()
        return frame.selectExpr(f"concat('{stream}:', n % 3) stream", "n")

    copied = rows("in", group="sink").union(rows("shared", group="g", readAs="group"))
    while True:
        writer = copied.writeStream.format("deadly-streams").options(url=url, checkpointLocation=checkpoint)
        try:
            run_to_end(writer)
            break
        except StreamingQueryException as error:
            print("begins again after:", str(error)[:2_000], file=sys.stderr, flush=True)  # noqa: T201
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
