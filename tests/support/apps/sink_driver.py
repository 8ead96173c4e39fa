"""A driver that copies the stream `in` to streams by a column, and begins again whenever its query fails.

Arguments: URL, checkpoint folder, master, most entries in a batch, more options of the source as JSON. It ends when all that was there is copied.
"""

import json
import sys

from pyspark.errors import StreamingQueryException

from millstream.spark.run.session import open_session
from tests.support.apps.sink_source import DeadlySource
from tests.support.triggers import run_to_end


def main(url: str, checkpoint: str, master: str, most: str, options: str) -> None:
    """Run to the end."""
    spark = open_session("sink", master=master, conf={})
    spark.dataSource.register(DeadlySource)
    source = {
        "url": url,
        "subscribe": "in",
        "group": "sink",
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": most,
    }
    source |= json.loads(options)
    while True:
        frame = spark.readStream.format("deadly-streams").options(**source).schema("n int").load()
        rows = frame.selectExpr("concat('out', n % 3) stream", "n")
        writer = rows.writeStream.format("deadly-streams").options(url=url, checkpointLocation=checkpoint)
        try:
            run_to_end(writer)
            break
        except StreamingQueryException as error:
            print("begins again after:", str(error)[:2_000], file=sys.stderr, flush=True)  # noqa: T201
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
