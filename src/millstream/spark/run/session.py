"""The Spark session of `millstream run`, and the Java process behind it."""

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
from pyspark import SparkConf
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import SparkSession

from millstream.errors import ConfigError, PipelineFailed
from millstream.handlers.handler import Handler
from millstream.spark.run.connect_guard import refuse_connect
from millstream.spark.run.failures import java_reason
from millstream.spark.run.spark_home import WRITE_ARCHIVE, archive_options, use_quick_home
from millstream.spark.versions import (
    LOCAL_CHECKPOINTS,
    SETTINGS,
    accumulator_server,
    activate,
    has_java,
    hide_closed_connections,
    java_classes,
    java_context,
    java_of_failed_launch,
    java_process,
    java_session,
    launch_java,
    use_java,
)

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_STACK = "-Xss16m"
"""Java's stack of a thread: Spark searches the error of a batch that a stop has interrupted with a regular expression that
recurses for each character (StreamExecution, PROXY_ERROR), and a Java error's text is long. It takes only what is used.
"""
FIRST_COMPILER = "-XX:TieredStopAtLevel=1"
"""Java's second compiler takes more than half of Java's processor time in the first minutes of a run. It saves
hardly anything of a handler's batches: Java moves blocks of messages, and Python processes them.
"""
_KEPT_LINES = 20
_DUPLICATE_LOGGERS = ("py4j", "DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""Loggers of errors that are also raised."""
_HANDSHAKE_TIMEOUT_S = 120
"""How long Spark's Java and Python processes wait for each other; Spark's 15 s are too short on a busy machine."""
_NOISE = (b"WARNING: Using incubator modules", b"Picked up JAVA_TOOL_OPTIONS")
_LOG_END_S = 2.0
_JAVA_EXIT_S = 20.0
_KILLED_WITHIN_S = 2.0
"""A process that was killed has ended so soon after the error of its connection."""
_MAX_EXIT_CODE = 128
"""A shell whose program a signal has ended, and Java itself, end with a greater code."""
_LAUNCHER_WAS_KILLED = re.compile(r"[^;]*spark-class: line \d+: CMD: [^;]*")
"""All that Spark's script says if the Java process that only puts the command together has ended without a word."""
JAVA_ENDED = (
    "Spark's Java process has ended: killed, or out of memory. Run the same command again: committed messages are not "
    "repeated"
)
_NO_MASTER = "Cannot call methods on a stopped SparkContext."
_FORMAT = "redis-streams"


def task_attempts(handlers: Iterable[Handler]) -> int:
    """Return the attempts per Spark task that a poison pill may need to become a dead letter: from 4 to 10."""
    attempts = max((handler.retry.attempts for handler in handlers), default=1) + 1
    return min(max(attempts, 4), 10)


def is_cluster(master: str) -> bool:
    """True if executors run on machines, or at least in folders, of their own."""
    return not re.fullmatch(r"local(\[.*\])?", master)


def default_settings(master: str, checkpoint: str = "") -> dict[str, str]:
    """Our defaults for a session of `master` with checkpoints at `checkpoint`; `--conf` overrides them."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.speculation": "false",
        "spark.python.authenticate.socketTimeout": f"{_HANDSHAKE_TIMEOUT_S}s",
        "spark.python.daemon.module": "millstream.spark.python_daemon",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.streaming.minBatchesToRetain": "10",
        "spark.sql.streaming.numRecentProgressUpdates": "5",
        "spark.sql.streaming.stopTimeout": "20s",
        **SETTINGS,
    }
    if master.startswith("local"):
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if not is_cluster(master):
        settings["spark.sql.shuffle.partitions"] = str(os.cpu_count())
        if "://" not in checkpoint:  # on a cluster, a path may be on its file system
            settings["spark.sql.streaming.checkpointFileManagerClass"] = LOCAL_CHECKPOINTS
    return settings


def open_session(
    name: str,
    *,
    master: str,
    conf: Mapping[str, str],
    checkpoint: str = "",
    handlers_only: bool = False,
    verbose: bool = False,
) -> SparkSession:
    """Return a session for `master`; `conf` overrides our defaults.

    Raises ConfigError if Spark cannot start with them, and PipelineFailed if its Java process is killed meanwhile.

    `checkpoint`: where its queries keep their checkpoints, if that is a URL and not a folder of this machine.
    `handlers_only`: its queries are those of handlers; on one machine Java then compiles for quick starts alone.

    The logs of Spark and of its Java bridge are shown only if `verbose`: every error also reaches its caller.
    """
    refuse_connect(master, conf)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if not (is_cluster(master) and "PYSPARK_PYTHON" in os.environ):  # a cluster may have it elsewhere
        os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_AUTH_SOCKET_TIMEOUT", str(_HANDSHAKE_TIMEOUT_S))
    log_file = resources.files("millstream.spark") / "log4j2.properties"
    level = "warn" if verbose else "off"
    if not verbose:
        for duplicate in _DUPLICATE_LOGGERS:
            logging.getLogger(duplicate).setLevel(logging.CRITICAL)
        logging.getLogger().addFilter(_is_not_py4j)
    java_options = f"{_STACK} -Dlog4j2.configurationFile=file:{log_file} -Dmillstream.spark.log={level}"
    settings = default_settings(master, checkpoint) | dict(conf)
    if not is_cluster(master) and not has_java():
        java_options += _quick_start_options(settings.get(_JAVA_OPTIONS, ""))
        java_options += f" {FIRST_COMPILER}" if handlers_only else ""
    settings[_JAVA_OPTIONS] = f"{java_options} {settings.get(_JAVA_OPTIONS, '')}".strip()
    whole = SparkConf().setAppName(name).setMaster(master).setAll(list(settings.items()))
    if not has_java():
        _start_java(whole)
    try:
        spark = SparkSession.builder.config(conf=whole).getOrCreate()
        if (server := accumulator_server(spark)) is not None:
            hide_closed_connections(server)
        return spark
    except (PySparkException, Py4JError, ValueError, OSError) as error:
        has_answered = isinstance(error, PySparkException | Py4JJavaError | ValueError)
        if not has_answered and _was_killed(java_process()):
            raise PipelineFailed(JAVA_ENDED) from error
        reason = java_reason(error)
        if reason.endswith(_NO_MASTER):
            raise ConfigError(
                f"Spark cannot reach the master {master}: does it run under exactly this URL? --spark-log shows more"
            ) from error
        raise ConfigError(f"Spark refuses its settings (--spark-master, --conf): {reason}") from error


def close_session(spark: SparkSession) -> None:
    """Stop `spark`, unless its Java process has ended or is ending: a signal to the process group ends it too."""
    try:
        if not java_has_ended():
            spark.stop()
    except (Py4JError, OSError):
        if not java_has_ended(within_s=_JAVA_EXIT_S):
            raise


def make_active(spark: SparkSession) -> None:
    """Make `spark` the active session of this thread, which some calls use, such as the lookup of a sink's format."""
    activate(spark)


def prefill_environment(spark: SparkSession) -> None:
    """Put the variables that Spark adds to our data source's environment there before any query starts.

    Spark keeps one Python function of a data source for all queries of a Java process. Each starting query puts the
    same few variables into its environment, a Scala HashMap, without a lock (PythonStreamingSourceRunner.init). If two
    queries start at once in a new session, as after a restart, the map may count an entry twice. From then on nothing
    that holds it can be serialized: every query ends with "Task not serializable", however often it is restarted.
    Putting a variable that is there already changes no count.

    On one machine it also removes the import path that Spark has put there: every Python that Spark starts has the
    PYTHONPATH of the Java process. Spark starts a daemon of Python workers for each environment, so since Spark 4.2 one
    daemon serves all tasks, those of the source and those of handlers.
    """
    timeout_s = spark.sparkContext.getConf().get("spark.python.authenticate.socketTimeout", "15s")
    known = {
        "SPARK_LOCAL_DIRS": "",
        "SPARK_AUTH_SOCKET_TIMEOUT": timeout_s.removesuffix("s"),
        "SPARK_BUFFER_SIZE": "65536",
        "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
    }
    source = java_session(spark).sessionState().dataSourceManager().lookupDataSource(_FORMAT)
    environment = source.dataSourceCls().envVars()
    if not is_cluster(str(spark.sparkContext.master)):
        environment.remove("PYTHONPATH")
    for name, value in {**spark.sparkContext.environment, **known}.items():
        environment.putIfAbsent(name, value)


def has_stopped(spark: SparkSession) -> bool:
    """Whether the session has stopped, as after its cluster removed it: none of its queries will run again."""
    return bool(java_context(spark).sc().isStopped())


def java_has_ended(*, within_s: float = 0.0) -> bool:
    """Whether the Java process of the sessions has ended, or ends within so many seconds: then every call fails."""
    return _exit_code(java_process(), within_s) is not None


def has_executors(spark: SparkSession) -> bool:
    """Whether there is an executor to run tasks. Raises what pyspark does."""
    if not is_cluster(str(spark.sparkContext.master)):
        return True
    return len(java_context(spark).sc().statusTracker().getExecutorInfos()) > 1  # the driver is one of them


def check_compression(spark: SparkSession) -> None:
    """Load the library that compresses what the driver answers executors. Raises ConfigError if that fails.

    Spark loads it at the first shuffle, in a thread that then ends without an answer: the batch would wait for ever.
    """
    codec = spark.sparkContext.getConf().get("spark.shuffle.mapStatus.compression.codec", "zstd")
    if codec != "zstd":
        return
    try:
        java_classes(spark).com.github.luben.zstd.util.Native.load()
    except Py4JJavaError as error:
        raise ConfigError(
            f"Java cannot load Spark's library zstd from its folder for temporary files ({java_reason(error)}); mount /tmp "
            "without noexec, for executors too, or set -Djava.io.tmpdir in the extraJavaOptions of both"
        ) from error


def checkpoint_begun(spark: SparkSession, path: str, marker: str) -> bool:
    """Create the folder `path`, on any Hadoop file system, if missing; True if a query has begun in it.

    On one machine other users cannot read a folder that it creates. On a cluster they may have to: executors may run
    as another user.

    A query has begun if the file `marker` exists, or the folder `marker` with a finished file in it. Raises ConfigError
    if the folder cannot be used.
    """
    try:
        files, folder = _folder(spark, path)
        if files.getUri().getScheme() == "file" and not is_cluster(str(spark.sparkContext.master)):
            with suppress(OSError):  # the next call says why
                make_private(Path(str(folder.toUri().getPath())))
        if not files.mkdirs(folder):
            raise ConfigError(
                f"the checkpoint folder {path!r} cannot be created; make it writable, or give another --checkpoint"
            )
        return not all(map(_is_unfinished, _listed(spark, f"{path}/{marker}")))
    except (Py4JJavaError, PySparkException) as error:
        raise ConfigError(
            f"the checkpoint folder {path!r} cannot be used ({java_reason(error)}); give another --checkpoint"
        ) from error


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700, and leave those that exist as they are. Raises OSError."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(0o700, exist_ok=True)


def clear_unfinished(spark: SparkSession, path: str) -> None:
    """Remove the unfinished files that a query left in the checkpoint `path` if it died in its first batch.

    Spark treats that batch as never started, and then refuses its folder because it is not empty (MicroBatchExecution):
    without this removal the checkpoint would be unusable. Raises what pyspark does.
    """
    files, _ = _folder(spark, path)
    left = _listed(spark, f"{path}/offsets")
    if all(map(_is_unfinished, left)):
        for one in left:
            files.delete(one, False)


def _folder(spark: SparkSession, path: str) -> tuple[JavaObject, JavaObject]:
    """Return the file system of `path`, and the path on it."""
    folder = java_classes(spark).org.apache.hadoop.fs.Path(path)
    return folder.getFileSystem(java_context(spark).hadoopConfiguration()), folder


def _listed(spark: SparkSession, path: str) -> list[JavaObject]:
    """Return the paths in a folder; `path` itself if it is a file, and none if it does not exist."""
    files, folder = _folder(spark, path)
    return [one.getPath() for one in files.listStatus(folder)] if files.exists(folder) else []


def _is_unfinished(path: JavaObject) -> bool:
    return str(path.getName()).startswith(".")


def _is_not_py4j(record: logging.LogRecord) -> bool:
    # py4j logs some errors that it raises to the root logger.
    return "py4j" not in Path(record.pathname).parts


# --- The Java process ---


def _quick_start_options(wanted: str) -> str:
    """Use the quick home, and return the options of Java for its class archive. `wanted`: the user's own."""
    home = use_quick_home()
    if home is None or WRITE_ARCHIVE in wanted:
        return ""
    return "".join(f' "{option}"' for option in archive_options(home))


def _start_java(conf: SparkConf) -> None:
    """Start Spark's Java process, for this process's lifetime.

    Raises ConfigError with its output if it fails, and PipelineFailed if it is killed meanwhile.
    """
    reader, writer = os.pipe()
    log = _JavaLog(reader)
    log.start()
    try:
        # A process group of its own: a signal to ours would otherwise end Java before its queries.
        gateway = launch_java(conf, stderr=writer)
    except (PySparkRuntimeError, Py4JError, OSError) as error:
        os.close(writer)
        log.join(_LOG_END_S)
        reason = log.reason() or str(error)
        home = os.environ.get("JAVA_HOME")
        java = shutil.which("java", path=str(Path(home) / "bin") if home else None)
        if home and java is None:  # Spark's script may have another one from conf/spark-env.sh, so it was tried
            raise ConfigError(f"JAVA_HOME is {home!r}, which has no bin/java: correct or unset it") from error
        if _was_killed(java_of_failed_launch(error)) or _LAUNCHER_WAS_KILLED.fullmatch(reason):
            raise PipelineFailed(JAVA_ENDED) from error
        hint = "check --spark-master and --conf" if java else "install Java 17 or later, or set JAVA_HOME"
        raise ConfigError(f"Spark's Java process cannot start: {reason}; {hint}") from error
    os.close(writer)
    use_java(gateway)
    log.release()


def _was_killed(process: subprocess.Popen[bytes] | None) -> bool:
    """Whether a signal has ended a Java process that does not answer."""
    code = _exit_code(process, _KILLED_WITHIN_S)
    return code is not None and (code < 0 or code > _MAX_EXIT_CODE)


def _exit_code(process: subprocess.Popen[bytes] | None, within_s: float) -> int | None:
    """The exit code of a process that has ended, or ends within so many seconds."""
    if process is None:
        return None
    with suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return process.returncode


class _JavaLog(threading.Thread):
    """Forwards the Java process's stderr; buffers it until the process is known to run."""

    def __init__(self, reader: int) -> None:
        super().__init__(daemon=True, name="java-log")
        self._reader = reader
        self._lock = threading.Lock()
        self._released = False
        self.buffered: deque[str] = deque(maxlen=_KEPT_LINES)

    def run(self) -> None:
        """Forward or buffer lines until the Java process closes stderr."""
        with os.fdopen(self._reader, "rb") as lines:
            for line in lines:
                if line.startswith(_NOISE):
                    continue
                with self._lock:
                    if not self._released:
                        self.buffered.append(line.decode("utf-8", "replace").strip())
                        continue
                _forward(line)

    def reason(self) -> str:
        """Return the buffered lines, without stack frames."""
        with self._lock:
            lines = [line for line in self.buffered if line and not line.startswith(("at ", "..."))]
        return "; ".join(line.removeprefix('Exception in thread "main" ') for line in lines)

    def release(self) -> None:
        """Forward the buffered lines, and from now on every line."""
        with self._lock:
            for held in self.buffered:
                _forward(f"{held}\n".encode())
            self.buffered.clear()
            self._released = True


def _forward(line: bytes) -> None:
    with suppress(OSError):  # stderr may be closed
        os.write(2, line)
