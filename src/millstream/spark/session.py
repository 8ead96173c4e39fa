"""The Spark session that `millstream run` works on."""

import os
import sys
from collections.abc import Iterable, Mapping
from importlib import resources

from pyspark.sql import SparkSession

from millstream.errors import PipelineFailed
from millstream.handlers import Handler


def local_master(handlers: Iterable[Handler]) -> str:
    """`local[*]`, with as many tries per task as a message that kills its process may need to become a dead letter."""
    tries = max((handler.retry.attempts for handler in handlers), default=1) + 1
    return f"local[*,{min(max(tries, 4), 10)}]"


def open_session(name: str, *, master: str, conf: Mapping[str, str], verbose: bool = False) -> SparkSession:
    """Return a session for `master`, with `conf` over our defaults. Raises PipelineFailed if Spark cannot start."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    log_file = resources.files("millstream.spark") / "log4j2.properties"
    level = "warn" if verbose else "off"
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.speculation": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.streaming.minBatchesToRetain": "10",
        "spark.sql.streaming.numRecentProgressUpdates": "5",
        "spark.sql.streaming.stopTimeout": "20s",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{log_file} -Dmillstream.spark.log={level}",
    }
    if master.startswith("local"):
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in (settings | dict(conf)).items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except (RuntimeError, OSError) as error:  # what pyspark raises when its Java process does not come up
        raise PipelineFailed(
            f"Spark could not start ({error}); is a Java 17+ runtime installed? try: java -version"
        ) from error


def path_has_files(spark: SparkSession, path: str) -> bool:
    """True if the folder `path`, on whatever file system it names, exists and holds something."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    folder = jvm.org.apache.hadoop.fs.Path(path)
    files = folder.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
    return bool(files.exists(folder) and len(files.listStatus(folder)))
