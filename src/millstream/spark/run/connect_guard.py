"""Spark Connect, where it cannot be used. Sources and sinks work there (`docs/spark-connect.md`); handlers and stages do not.

They speak to Spark's Java process itself, and see every batch in this one: a Connect session has neither to give.
"""

import os
from collections.abc import Mapping

from millstream.errors import ConfigError

_WHY = "handlers and stages need a Spark session of their own, and Spark Connect gives none"


def refuse_connect(master: str, conf: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if Spark would take these settings for Spark Connect's; the message says which to drop."""
    if master.startswith("sc://"):
        raise ConfigError(f"--master {master}: {_WHY}; name the cluster itself, as in --master spark://HOST:7077")
    if conf.get("spark.api.mode", environ.get("SPARK_API_MODE", "")).lower() == "connect":
        raise ConfigError(f"spark.api.mode (SPARK_API_MODE) is connect: {_WHY}; drop it, or say classic")
    if "spark.remote" in conf:
        raise ConfigError(f"--conf spark.remote: {_WHY}; drop it, and name the cluster by --master")
    for variable in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
        if variable in environ:
            raise ConfigError(f"the variable {variable} is set: {_WHY}; unset it, and name the cluster by --master")


def refuse_session(spark: object) -> None:
    """Raise ConfigError for a session of Spark Connect."""
    if type(spark).__module__.startswith("pyspark.sql.connect."):
        raise ConfigError(f"this is a session of Spark Connect: {_WHY}; make one by SparkSession.builder.master(...)")
