"""Redis Streams in a notebook: history, filters that Redis is spared, a live query to look at.

Cells are marked by `# %%`: VS Code, PyCharm and Spyder run them one by one, `jupytext --to ipynb` makes a notebook of them,
and `python examples/notebook.py` runs them all. It starts a redis-server of its own, unless MILLSTREAM_URL says where one is.
"""

# %% A session, and some history to look at: two hours of temperatures, an entry a second
import os
import random
import sys
import time
from datetime import UTC, datetime, timedelta

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's workers: the Python of this notebook
spark = (
    SparkSession.builder.appName("notebook")
    .master("local[2]")
    .config("spark.sql.python.filterPushdown.enabled", True)
    .config("spark.sql.shuffle.partitions", 2)
    .config("spark.sql.session.timeZone", "UTC")
    .getOrCreate()
)
server = EmbeddedServer()
if "MILLSTREAM_URL" not in os.environ:
    server.start()
url = os.environ.get("MILLSTREAM_URL") or server.url
redis = Client(url)


def measure(at: datetime) -> tuple[str | float, ...]:
    """A measurement, as the command that adds it."""
    room = random.choice(["kitchen", "cellar", "attic"])
    return (
        "XADD",
        "temperatures",
        f"{int(at.timestamp() * 1000)}-*",
        "room",
        room,
        "celsius",
        round(random.gauss(18), 2),
    )


now = datetime.now(UTC).replace(microsecond=0)
redis.pipeline([measure(now - timedelta(seconds=second)) for second in range(7_200, 0, -1)])

# %% A batch read: typed columns, and of all the history only what the filter leaves is fetched from Redis
history = (
    spark.read.format("redis-streams")
    .option("url", url)
    .option("subscribe", "temperatures")
    .option("pushDownPredicate", True)
    .schema("_timestamp timestamp, room string, celsius double")
    .load()
)
last_minutes = history.where(F.col("_timestamp") >= now - timedelta(minutes=10))
last_minutes.groupBy("room").agg(F.count("*").alias("values"), F.round(F.avg("celsius"), 2).alias("mean")).show()

# %% The comparison has become a range of entry ids: all that is left of it in Spark's plan is `isnotnull`
last_minutes.explain()

# %% pandas, and whatever draws it
frame = last_minutes.toPandas()
print(frame.describe())

# %% The same stream, live: a query that keeps its result in memory, under a name for SQL
live = (
    spark.readStream.format("redis-streams")
    .option("url", url)
    .option("subscribe", "temperatures")
    .option("startingTimestamp", (now - timedelta(minutes=1)).isoformat())
    .option("group", "notebook")
    .schema("_timestamp timestamp, room string, celsius double")
    .load()
)
rooms = live.groupBy("room").agg(F.count("*").alias("values"), F.max("celsius").alias("highest"))
query = rooms.writeStream.queryName("rooms").format("memory").outputMode("complete").start()

# %% Look at it as often as you like: `display(...)` instead of `.show()` redraws a cell's output in Jupyter
for _ in range(3):
    redis.pipeline([measure(datetime.now(UTC)) for _ in range(20)])
    query.processAllAvailable()  # for the example's sake; without it the table is as of the last batch
    spark.table("rooms").orderBy("room").show()
    time.sleep(0.5)

# %% How it gets on: rows a second, and how far it is behind; `XINFO GROUPS temperatures` shows its group `notebook` as well
if progress := query.lastProgress:
    print(f"batch {progress.batchId}: {progress.numInputRows} rows, {progress.processedRowsPerSecond:.0f} a second")

# %% Stop: the query first, then what this notebook has started
query.stop()
redis.close()
spark.stop()
server.stop()
