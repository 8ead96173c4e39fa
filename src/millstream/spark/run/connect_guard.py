"""Refuses Spark Connect for handlers and stages. Sources and sinks work there (`docs/spark-connect.md`).

Handlers and stages call Spark's Java process directly and see every batch in this process; a Connect session offers
neither.
"""

import os
from collections.abc import Mapping

from millstream.errors import ConfigError

_WHY = "handlers and stages need a Spark session of their own, which Spark Connect does not provide"


def refuse_connect(master: str, conf: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if these settings select Spark Connect; the message says which to drop."""
    if master.startswith("sc://"):
        raise ConfigError(
            f"--spark-master {master}: {_WHY}; name the cluster itself, as in --spark-master spark://HOST:7077"
        )
    if conf.get("spark.api.mode", environ.get("SPARK_API_MODE", "")).lower() == "connect":
        raise ConfigError(f"spark.api.mode (SPARK_API_MODE) is connect: {_WHY}; drop it, or set it to classic")
    if "spark.remote" in conf:
        raise ConfigError(f"--conf spark.remote: {_WHY}; drop it, and name the cluster by --spark-master")
    for variable in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
        if variable in environ:
            raise ConfigError(
                f"the variable {variable} is set: {_WHY}; unset it, and name the cluster by --spark-master"
            )


def refuse_session(spark: object) -> None:
    """Raise ConfigError for a Spark Connect session."""
    if type(spark).__module__.startswith("pyspark.sql.connect."):
        raise ConfigError(f"this is a Spark Connect session: {_WHY}; create one with SparkSession.builder.master(...)")
