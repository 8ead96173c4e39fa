"""The differences between the versions of Spark that millstream runs on, and all use of its private parts.

No other module checks for a version, or uses the Java side of a session.

`docs/spark-versions.md` lists for users what each version lacks.
"""

import logging
import socket
import subprocess
import sys
from contextlib import suppress
from inspect import signature
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.sql import datasource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from socketserver import BaseServer

    import pyarrow as pa
    from pyspark import SparkConf
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
    from pyspark.sql.types import StructType

__all__ = [
    "CHECKPOINT_READERS",
    "HAS_FILTERS",
    "HAS_LIMITS",
    "LOCAL_CHECKPOINTS",
    "SETTINGS",
    "SPARK_VERSION",
    "SUPPORTED",
    "ArrowFunction",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
    "accumulator_server",
    "activate",
    "arrow_schema",
    "end_java",
    "has_java",
    "hide_closed_connections",
    "java_classes",
    "java_context",
    "java_of_failed_launch",
    "java_process",
    "java_session",
    "launch_java",
    "spark_schema",
    "use_java",
]

logger = logging.getLogger(__name__)

SPARK_VERSION: str = pyspark.__version__

SUPPORTED = "4.0 to 4.3"
"""The versions that the tests pass on, as errors name them."""

_VERSION = tuple(int(part) for part in SPARK_VERSION.split(".")[:2])

# --- Sources ---

HAS_FILTERS = hasattr(datasource, "Filter")
"""Whether Spark passes filters to a batch reader: since 4.1."""

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )

    HAS_LIMITS = True
    """Whether Spark passes a stream reader the start and the limit of a batch, and the trigger: since 4.2.

    Since then its progress reports have the newest offset, too. Before, `TrackingReader` makes up for it.
    """
except ImportError:
    from dataclasses import dataclass

    HAS_LIMITS = False

    class ReadLimit:  # type: ignore[no-redef]
        """As in PySpark 4.2."""

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """As in PySpark 4.2."""

    @dataclass
    class ReadMinRows(ReadLimit):  # type: ignore[no-redef]
        """As in PySpark 4.2."""

        min_rows: int

    @dataclass
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """As in PySpark 4.2."""

        max_rows: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """As in PySpark 4.2."""


# --- Sinks ---

if not TYPE_CHECKING:
    if hasattr(datasource, "DataSourceStreamArrowWriter"):  # since 4.1
        DataSourceStreamArrowWriter = datasource.DataSourceStreamArrowWriter
    else:

        class DataSourceStreamArrowWriter(datasource.DataSourceStreamWriter, datasource.DataSourceArrowWriter):
            """As in PySpark 4.1: 4.0 gives record batches to each DataSourceArrowWriter, of streams, too."""


# --- Private parts of PySpark ---


def arrow_schema(schema: "StructType") -> "pa.Schema":
    """The schema of record batches with the columns of `schema`; timestamps are in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    is_named = "timezone" in signature(to_arrow_schema).parameters  # since 4.2; before, UTC is its default
    return to_arrow_schema(schema, timezone="UTC") if is_named else to_arrow_schema(schema)


def spark_schema(schema: "pa.Schema") -> "StructType":
    """The columns of record batches of `schema`."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


class ArrowFunction:
    """A function for the `mapInArrow` of many frames with the same columns.

    A frame's own method pickles the function for each frame, and needs some forty calls of the JVM.
    """

    def __init__(
        self,
        function: "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]",
        columns: "Sequence[str]",
        schema: "StructType",
    ) -> None:
        from pyspark.sql.functions import col
        from pyspark.sql.pandas.functions import pandas_udf
        from pyspark.util import PythonEvalType

        make_column: Any = pandas_udf(  # type: ignore[call-overload]  # as PySpark's own `mapInArrow`
            function, returnType=schema, functionType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF
        )
        self._column = make_column(*map(col, columns))

    def on(self, frame: "DataFrame") -> "DataFrame":
        """As `frame.mapInArrow`."""
        java_frame: Any = frame._jdf
        return type(frame)(java_frame.mapInArrow(self._column._jc, False, None), frame.sparkSession)


# --- The Java side of PySpark, private in all versions ---


def has_java() -> bool:
    """True if this process is connected to a Java process of Spark."""
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def launch_java(conf: "SparkConf", *, stderr: int) -> Any:
    """Start a Java process of Spark in a process group of its own, and return the gateway to it.

    Its stderr goes to the file descriptor `stderr`. Raises what pyspark does.
    """
    from pyspark.java_gateway import launch_gateway

    return launch_gateway(conf, popen_kwargs={"stderr": stderr, "process_group": 0})


def java_of_failed_launch(error: BaseException) -> "subprocess.Popen[bytes] | None":
    """The Java process that `launch_java` has started before it raised `error`; None if it has started none."""
    traceback = error.__traceback__
    while traceback is not None:
        # PySpark returns the process with the gateway, and not with an error.
        if (process := traceback.tb_frame.f_locals.get("proc")) is not None:
            return process  # type: ignore[no-any-return]
        traceback = traceback.tb_next
    return None


def use_java(gateway: Any) -> None:
    """Let all sessions of this process use the Java process behind `gateway`."""
    from pyspark import SparkContext

    SparkContext._ensure_initialized(gateway=gateway)


def java_process() -> "subprocess.Popen[bytes] | None":
    """The Java process of the sessions of this process; None if another process has started it."""
    from pyspark import SparkContext

    return getattr(SparkContext._gateway, "proc", None)


def end_java(within_s: float) -> int | None:
    """End the Java process of this process's stopped sessions; return its exit code, None if it has not ended in time."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    gateway.proc.stdin.close()  # Spark's Java ends with its standard input (PythonGatewayServer)
    with suppress(subprocess.TimeoutExpired):
        gateway.proc.wait(within_s)
    return gateway.proc.returncode  # type: ignore[no-any-return]


def accumulator_server(spark: "SparkSession") -> "BaseServer | None":
    """The server of this process to which Java sends what tasks add to accumulators."""
    return getattr(spark.sparkContext, "_accumulatorServer", None)


def hide_closed_connections(server: "BaseServer") -> None:
    """Let the server of accumulators print no traceback where Java has closed a connection to it.

    Java does so when a stop interrupts it, at times before it has sent anything: for PySpark that is a wrong token, or an
    unexpected end. All other errors are printed as before (`socketserver.BaseServer.handle_error`).
    """
    print_error = server.handle_error

    def handle_error(request: Any, client_address: Any) -> None:
        if _is_closed(request):
            logger.debug("Java has closed its connection for accumulators: %r", sys.exc_info()[1])
        else:
            print_error(request, client_address)

    server.handle_error = handle_error  # type: ignore[method-assign]


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed the connection, and nothing of it is left to read."""
    try:
        return connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def java_classes(spark: "SparkSession") -> Any:
    """The Java classes of a session's process, by their names as attributes."""
    classes = spark.sparkContext._jvm
    assert classes is not None
    return classes


def java_context(spark: "SparkSession") -> Any:
    """The `JavaSparkContext` of a session."""
    return spark.sparkContext._jsc


def java_session(spark: "SparkSession") -> Any:
    """The `SparkSession` of Java behind a session."""
    return spark._jsparkSession


def activate(spark: "SparkSession") -> None:
    """Make `spark` the active session of this thread in Java."""
    type(spark)._get_j_spark_session_class(java_classes(spark)).setActiveSession(java_session(spark))


# --- Java classes ---

_STREAMING = "org.apache.spark.sql.execution.streaming."

LOCAL_CHECKPOINTS = (
    _STREAMING + ("" if _VERSION < (4, 1) else "checkpointing.") + "FileSystemBasedCheckpointFileManager"
)
"""The class that writes checkpoints on a local disk without help of other programs.

By default Spark writes them through Hadoop's FileContext, which starts the program `readlink` for each file that it
renames: some 35 processes and 50 ms a batch (Hadoop, FileUtil.readLink). Both overwrite a file by one rename.
"""

SETTINGS = {"spark.sql.execution.arrow.maxBytesPerBatch": "64m"} if _VERSION < (4, 1) else {}
"""Settings that later versions have by default: 4.0 gives a task all rows of its share in one record batch."""

CHECKPOINT_READERS = tuple(
    _STREAMING + part
    for part in (
        *("checkpointing.", "state.", "runtime.StreamMetadata"),
        # 4.0
        *("StreamMetadata", "HDFSMetadataLog", "OffsetSeq", "CommitLog", "CheckpointFileManager"),
        *("FileSystemBasedCheckpointFileManager", "FileContextBasedCheckpointFileManager"),
    )
)
"""Beginnings of the names of classes that read a checkpoint: https://github.com/apache/spark, branch-4.x,
sql/core/src/main/scala/org/apache/spark/sql/execution/streaming."""
