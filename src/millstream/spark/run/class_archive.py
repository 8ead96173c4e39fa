"""Writes the class archive of Spark's Java process: a training run loads the classes that pipelines use.

Java writes the archive when it ends (JEP 350, "Dynamic CDS Archives"). The training run needs no Redis: it has a source of
its own, and otherwise the plan of a handler's micro-batch.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from millstream.errors import ConfigError
from millstream.spark.engine.micro_batch import Shuffle
from millstream.spark.key_blocks import SCHEMA, bucket_count, make_blocks, sortable
from millstream.spark.run.failures import java_reason
from millstream.spark.run.session import close_session, open_session
from millstream.spark.run.spark_home import WRITE_ARCHIVE, archive_name, use_quick_home
from millstream.spark.run.warm_up import unchanged
from millstream.spark.versions import end_java, has_java, java_of_failed_launch, java_process, spark_schema

_SOURCE = "millstream-training"
_CORES = 2
_WRITTEN_WITHIN_S = 300.0
_KILLED_WITHIN_S = 5.0
_TEMPORARY = "class-archive-"
_LOCK = "class-archive.lock"


@dataclass(frozen=True, kw_only=True)
class ClassArchive:
    """A class archive: its file, its size in bytes, and how long it took, in seconds."""

    path: Path
    size_bytes: int
    seconds: float


def write_class_archive(on_step: Callable[[str], None]) -> ClassArchive:
    """Write the class archive that later runs on this machine use, in place of an older one; `on_step` gets each step.

    Raises ConfigError if there can be none here, or if Java writes none. After a KeyboardInterrupt nothing of it is left.
    """
    began_s = time.monotonic()
    home = use_quick_home()
    if home is None:
        raise ConfigError(
            "there is no place for a class archive: it needs PySpark from PyPI, no SPARK_HOME, and a folder that can be "
            "written as $XDG_CACHE_HOME or ~/.cache"
        )
    if has_java():
        raise ConfigError("Spark's Java process runs already: write the class archive from a new process")
    try:
        with _temporary_folder(home) as folder:
            archive = _write(folder, home, on_step)
    except OSError as error:
        raise ConfigError(f"the class archive cannot be written: {error}; make {home} writable") from error
    except (PySparkException, Py4JError) as error:
        raise ConfigError(
            f"Spark cannot run the pipeline that the class archive is of: {java_reason(error)}"
        ) from error
    size_bytes = archive.stat().st_size
    return ClassArchive(path=archive, size_bytes=size_bytes, seconds=time.monotonic() - began_s)


@contextmanager
def _temporary_folder(home: Path) -> Iterator[Path]:
    """A folder in `home` for the block; those of commands that were killed are removed."""
    with (home / _LOCK).open("a+b") as lock:  # closed by a kill, too, and not inherited by Java
        with suppress(BlockingIOError):  # a command that runs holds it, and its folder stays
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in home.glob(f"{_TEMPORARY}*"):
                shutil.rmtree(left, ignore_errors=True)
        fcntl.flock(lock, fcntl.LOCK_SH)
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=home) as folder:
            yield Path(folder)


def _write(folder: Path, home: Path, on_step: Callable[[str], None]) -> Path:
    """Write the archive in `folder`, and move it to `home`; return where it is."""
    written = folder / "classes.jsa"
    java: subprocess.Popen[bytes] | None = None
    at_interrupt = signal.getsignal(signal.SIGINT)
    try:
        on_step("starting Spark")
        options = f'"{WRITE_ARCHIVE}{written}" -Xlog:disable'
        spark = open_session(
            "class-archive", master=f"local[{_CORES}]", conf={"spark.driver.extraJavaOptions": options}
        )
        java = java_process()
        signal.signal(signal.SIGINT, at_interrupt)  # PySpark's own calls the session, which may have stopped
        on_step("running a pipeline of one message")
        try:
            _train(spark, f"{folder}/checkpoint")
        except Exception:
            close_session(spark)
            end_java(_WRITTEN_WITHIN_S)
            raise
        close_session(spark)
        on_step("writing the archive")
        exit_code = end_java(_WRITTEN_WITHIN_S)
    except KeyboardInterrupt as interrupt:
        _kill(java or java_process() or java_of_failed_launch(interrupt))
        raise
    if exit_code != 0 or not written.exists():
        raise ConfigError(
            "Java has written no class archive: it needs Java 17 or later of OpenJDK, 200 MB of space in "
            f"{home}, and no folder {home / 'conf'}"
        )
    for old in home.glob(archive_name("*")):
        old.unlink(missing_ok=True)
    return written.rename(home / archive_name(written.stat().st_size))


def _kill(java: subprocess.Popen[bytes] | None) -> None:
    """Kill Java, which would otherwise write the archive for seconds more, into a folder that is being removed."""
    if java is None:
        return
    with suppress(ProcessLookupError):
        os.killpg(java.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        java.wait(_KILLED_WITHIN_S)


def _train(spark: SparkSession, checkpoint: str) -> None:
    """Run the plan of a handler's micro-batch once, and a query of Spark SQL on its rows."""
    spark.dataSource.register(_Source)
    done: list[int] = []

    def process(frame: DataFrame, _: int) -> None:
        done.append(len(Shuffle()(frame, _CORES).mapInArrow(unchanged, frame.schema).collect()))
        frame.groupBy("stream").count().collect()

    frame = spark.readStream.format(_SOURCE).load()
    query = frame.writeStream.foreachBatch(process).option("checkpointLocation", checkpoint).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    if sum(done) != 1:
        raise ConfigError(f"the training run has processed {sum(done)} messages, and not 1")


class _Source(DataSource):
    """A stream of one block with one message."""

    @classmethod
    def name(cls) -> str:
        return _SOURCE

    def schema(self) -> StructType:
        return spark_schema(SCHEMA)

    def streamReader(self, schema: StructType) -> "_Reader":  # noqa: N802 - Spark's names
        return _Reader()


class _Reader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"blocks": 0}

    def latestOffset(self, *_: Any) -> dict[str, Any]:  # noqa: N802 - Spark 4.2 passes start and limit
        return {"blocks": 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(0)] * (end["blocks"] - start["blocks"])

    def read(self, _: InputPartition) -> Iterator[pa.RecordBatch]:
        yield make_blocks([(_SOURCE, {b"key": [b"1-0", b""]}, sortable(b"1-0"))], bucket_count(_CORES))
