"""The Spark session that `millstream run` works on, and the Java process behind it."""

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from millstream.errors import ConfigError
from millstream.handlers.handler import Handler
from millstream.spark.run.connect_guard import refuse_connect
from millstream.spark.run.failures import java_reason

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_KEPT_LINES = 20
_TALKERS = ("py4j", "DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""Loggers of errors that are raised as well."""
_ANSWER_S = 120
"""How long Spark's Java and Python processes wait for each other to answer; 15 s, as usual, are too few on a busy machine."""
_USELESS = (b"WARNING: Using incubator modules", b"Picked up JAVA_TOOL_OPTIONS")
_END_S = 2.0
_DYING_S = 20.0
_NO_MASTER = "Cannot call methods on a stopped SparkContext."
_FORMAT = "redis-streams"


def task_tries(handlers: Iterable[Handler]) -> int:
    """As many tries per task as a message that kills its process may need to become a dead letter."""
    tries = max((handler.retry.attempts for handler in handlers), default=1) + 1
    return min(max(tries, 4), 10)


def is_cluster(master: str) -> bool:
    """True if executors run on machines, or at least in folders, of their own."""
    return not re.fullmatch(r"local(\[.*\])?", master)


def open_session(name: str, *, master: str, conf: Mapping[str, str], verbose: bool = False) -> SparkSession:
    """Return a session for `master`, with `conf` over our defaults. Raises ConfigError if Spark cannot start so.

    Spark's and its Java bridge's own logs are shown only if `verbose`: every error reaches its caller anyway.
    """
    refuse_connect(master, conf)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if not (is_cluster(master) and "PYSPARK_PYTHON" in os.environ):  # there it may be somewhere else
        os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_AUTH_SOCKET_TIMEOUT", str(_ANSWER_S))
    log_file = resources.files("millstream.spark") / "log4j2.properties"
    level = "warn" if verbose else "off"
    if not verbose:
        for talker in _TALKERS:
            logging.getLogger(talker).setLevel(logging.CRITICAL)
        logging.getLogger().addFilter(_is_not_py4j)
    java_options = f"-Dlog4j2.configurationFile=file:{log_file} -Dmillstream.spark.log={level}"
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.speculation": "false",
        "spark.python.authenticate.socketTimeout": f"{_ANSWER_S}s",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.streaming.minBatchesToRetain": "10",
        "spark.sql.streaming.numRecentProgressUpdates": "5",
        "spark.sql.streaming.stopTimeout": "20s",
    }
    if master.startswith("local"):
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if not is_cluster(master):
        settings["spark.sql.shuffle.partitions"] = str(os.cpu_count())
    settings |= conf
    settings[_JAVA_OPTIONS] = f"{java_options} {settings.get(_JAVA_OPTIONS, '')}".strip()
    whole = SparkConf().setAppName(name).setMaster(master).setAll(list(settings.items()))
    if SparkContext._gateway is None:
        _start_java(whole)
    try:
        return SparkSession.builder.config(conf=whole).getOrCreate()
    except (PySparkException, Py4JError, ValueError, OSError) as error:
        reason = java_reason(error)
        if reason.endswith(_NO_MASTER):
            raise ConfigError(
                f"Spark gave up on the master {master}: is one running there, under just that name? --spark-log shows more"
            ) from error
        raise ConfigError(f"Spark refuses its settings (--master, --conf): {reason}") from error


def close_session(spark: SparkSession) -> None:
    """Stop `spark`, unless its Java process has ended, or ends just now: what ends all of a group ends that as well."""
    try:
        if not java_has_ended(spark):
            spark.stop()
    except (Py4JError, OSError):
        if not java_has_ended(spark, within_s=_DYING_S):
            raise


def make_active(spark: SparkSession) -> None:
    """Have this thread's calls find `spark` where they look for it themselves, as for the format of a sink."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    SparkSession._get_j_spark_session_class(jvm).setActiveSession(spark._jsparkSession)


def settle_environment(spark: SparkSession) -> None:
    """Have what Spark notes in its record of our data source stand there before a query begins.

    Spark keeps one Python function of a data source for all queries of a Java process, and each query that begins puts
    the same few variables into its environment, a Scala HashMap, without a lock (PythonStreamingSourceRunner.init). Where
    two begin at once in a young session, as they do after a restart, the map may count an entry twice. From then
    on nothing that holds it can be serialised: every query ends with "Task not serializable", however often it is tried.
    To put what is there already changes no count.
    """
    timeout_s = spark.sparkContext.getConf().get("spark.python.authenticate.socketTimeout", "15s")
    known = {
        "SPARK_LOCAL_DIRS": "",
        "SPARK_AUTH_SOCKET_TIMEOUT": timeout_s.removesuffix("s"),
        "SPARK_BUFFER_SIZE": "65536",
        "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
    }
    source = spark._jsparkSession.sessionState().dataSourceManager().lookupDataSource(_FORMAT)
    environment = source.dataSourceCls().envVars()
    for name, value in known.items():
        environment.putIfAbsent(name, value)


def has_stopped(spark: SparkSession) -> bool:
    """Whether the session is over, as when its cluster has given it up: no query of it will ever run again."""
    return bool(spark.sparkContext._jsc.sc().isStopped())


def java_has_ended(spark: SparkSession, *, within_s: float = 0.0) -> bool:
    """Whether the Java process behind `spark` is gone, or goes within so many seconds: no call succeeds then."""
    process: subprocess.Popen[bytes] | None = getattr(spark.sparkContext._gateway, "proc", None)
    if process is None:
        return False  # somebody else has started it
    with suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return process.returncode is not None


def has_executors(spark: SparkSession) -> bool:
    """Whether anybody is there to run tasks. Raises what pyspark does."""
    context = spark.sparkContext
    if not is_cluster(str(context.master)):
        return True
    return len(context._jsc.sc().statusTracker().getExecutorInfos()) > 1  # the driver is among them


def checkpoint_begun(spark: SparkSession, path: str, sign: str) -> bool:
    """Make the folder `path`, on whatever file system it names, if it is not there; True if a query has begun in it:
    then its file `sign` is there, or its folder `sign` with something finished in it.

    Raises ConfigError if it cannot be used.
    """
    try:
        files, folder = _folder(spark, path)
        if not files.mkdirs(folder):
            raise ConfigError(
                f"the checkpoint folder {path!r} cannot be made; is it writable? give another --checkpoint"
            )
        return not all(map(_is_unfinished, _listed(spark, f"{path}/{sign}")))
    except (Py4JJavaError, PySparkException) as error:
        raise ConfigError(
            f"the checkpoint folder {path!r} cannot be used ({java_reason(error)}); give another --checkpoint"
        ) from error


def clear_unfinished(spark: SparkSession, path: str) -> None:
    """Remove what a query that died in its first batch was writing in the checkpoint `path`.

    Spark takes the batch for one that never was, and then refuses a folder for it that is not empty (its class
    MicroBatchExecution), so that without this the checkpoint could never be used again. Raises what pyspark does.
    """
    files, _ = _folder(spark, path)
    left = _listed(spark, f"{path}/offsets")
    if all(map(_is_unfinished, left)):
        for one in left:
            files.delete(one, False)


def _folder(spark: SparkSession, path: str) -> tuple[JavaObject, JavaObject]:
    """The file system that `path` is on, and its path there."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    folder = jvm.org.apache.hadoop.fs.Path(path)
    return folder.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration()), folder


def _listed(spark: SparkSession, path: str) -> list[JavaObject]:
    """The paths in a folder; that of `path` itself if it is a file, none if it is not there."""
    files, folder = _folder(spark, path)
    return [one.getPath() for one in files.listStatus(folder)] if files.exists(folder) else []


def _is_unfinished(path: JavaObject) -> bool:
    return str(path.getName()).startswith(".")


def _is_not_py4j(record: logging.LogRecord) -> bool:
    # It logs some of what it raises to the root logger.
    return "py4j" not in Path(record.pathname).parts


# --- The Java process ---


def _start_java(conf: SparkConf) -> None:
    """Start Spark's Java process, for this process's whole life. Raises ConfigError with what it says if it ends."""
    reader, writer = os.pipe()
    log = _JavaLog(reader)
    log.start()
    try:
        # A signal for all of our group is for us to obey: Java would end before its queries.
        gateway = launch_gateway(conf, popen_kwargs={"stderr": writer, "process_group": 0})
    except (PySparkRuntimeError, Py4JError, OSError) as error:
        os.close(writer)
        log.join(_END_S)
        said = log.reason() or str(error)
        home = os.environ.get("JAVA_HOME")
        java = shutil.which("java", path=str(Path(home) / "bin") if home else None)
        hint = "check --master and --conf" if java else "install Java 17 or later, or set JAVA_HOME"
        raise ConfigError(f"Spark's Java process cannot start: {said}; {hint}") from error
    os.close(writer)
    SparkContext._ensure_initialized(gateway=gateway)
    log.release()


class _JavaLog(threading.Thread):
    """Passes on what the Java process writes to stderr; holds it back until it is known that it runs."""

    def __init__(self, reader: int) -> None:
        super().__init__(daemon=True, name="java-log")
        self._reader = reader
        self._lock = threading.Lock()
        self._released = False
        self.held: deque[str] = deque(maxlen=_KEPT_LINES)

    def run(self) -> None:
        """Read to the end."""
        with os.fdopen(self._reader, "rb") as lines:
            for line in lines:
                if line.startswith(_USELESS):
                    continue
                with self._lock:
                    if not self._released:
                        self.held.append(line.decode("utf-8", "replace").strip())
                        continue
                _write_on(line)

    def reason(self) -> str:
        """What was held back, without the frames of tracebacks."""
        with self._lock:
            lines = [line for line in self.held if line and not line.startswith(("at ", "..."))]
        return "; ".join(line.removeprefix('Exception in thread "main" ') for line in lines)

    def release(self) -> None:
        """Pass on what was held back, and from now on all."""
        with self._lock:
            for held in self.held:
                _write_on(f"{held}\n".encode())
            self.held.clear()
            self._released = True


def _write_on(line: bytes) -> None:
    with suppress(OSError):  # stderr may be closed
        os.write(2, line)
