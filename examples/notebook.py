"""Redis Streams in a notebook: history, filters pushed down to Redis, and a live query.

Cells start with `# %%`: VS Code, PyCharm and Spyder run them one by one, `jupytext --to ipynb` converts them to a
notebook, and `python examples/notebook.py` runs them all. It starts a redis-server, unless MILLSTREAM_URL is set.
"""

# %% A session, and some history to look at: two hours of temperatures, an entry a second
import os
import random
import sys
import time
from datetime import UTC, datetime, timedelta

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from millstream.redis_client import Client, EmbeddedServer

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
    """Return the command that adds a measurement."""
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

# %% A batch read: typed columns; the filter is pushed down, so only matching history is fetched from Redis
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

# %% The comparison has become a range of entry ids: only `isnotnull` of it is left in Spark's plan
last_minutes.explain()

# %% The same as a pandas DataFrame, for any plotting library
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

# %% Query the result as often as you like; in Jupyter, `display(...)` instead of `.show()` redraws a cell's output
for _ in range(3):
    redis.pipeline([measure(datetime.now(UTC)) for _ in range(20)])
    query.processAllAvailable()  # only for this example; without it the table shows the last batch
    spark.table("rooms").orderBy("room").show()
    time.sleep(0.5)

# %% Progress: rows a second, and the lag; `XINFO GROUPS temperatures` shows the query's group `notebook` too
if progress := query.lastProgress:
    print(f"batch {progress.batchId}: {progress.numInputRows} rows, {progress.processedRowsPerSecond:.0f} a second")

# %% Stop: the query first, then Spark and the server that this notebook started
query.stop()
redis.close()
spark.stop()
server.stop()
