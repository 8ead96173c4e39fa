"""Quick starts of the Python that Spark starts for the sources and sinks of each query.

Spark runs the module `python_streaming_source_runner` in a new process each time, and a daemon, with a worker, for each
thing that it asks of a source or a sink. These import PySpark, pyarrow and redis-py: half a second of processor time. Here
that process has one with all of it imported, started once, fork another that does the work with its environment, its import
path and its pipes, and waits for it; either ends with the other. Each imports millstream's source itself, which notes whose
child it is; the modules behind it are there. Tests that send millstream to executors start all of it.
Tasks run in the processes that Spark starts itself, which tests look for and kill.
"""

import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import get_ready_to_fork, receive, take_place

RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
DAEMON, WORKERS = "pyspark.daemon", "pyspark.sql.worker."
"""The module that forks workers, and where those of sources and sinks are."""
VARIABLE = "MILLSTREAM_TEST_SPARK_PYTHONS"
"""Names the socket of the process that forks; without it Spark's processes do all themselves."""
SITE = f"""
import os, sys
if {VARIABLE!r} in os.environ and sys.orig_argv[-1].startswith({(RUNNER, WORKERS)!r}):
    path = sys.path[:]
    sys.path[:] = [one for one in path if one.startswith(sys.base_prefix)]  # archives take long to look through
    import _socket, marshal  # what `socket` imports takes longer than all of this
    connection = _socket.socket(_socket.AF_UNIX)
    try:
        connection.connect(os.environ[{VARIABLE!r}])
    except OSError:
        sys.path[:] = path
        raise
    about = marshal.dumps((dict(os.environ), os.getcwd(), path, sys.orig_argv))
    pipes = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    connection.sendmsg([len(about).to_bytes(8, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, pipes)])
    connection.sendall(about)
    os._exit((connection.recv(1) or b"\\1")[0])
"""
"""The module `sitecustomize` of every Python that Spark starts."""

_MODULES = (
    "pandas",
    "pyspark.worker_util",
    "pyspark.sql.datasource_internal",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.streaming.datasource",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.data_source_pushdown_filters",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "concurrent.futures.thread",
    "difflib",
    "encodings.idna",
    "redis.cluster",
    "redis.sentinel",
    "millstream.redis_client.deployments",
    "millstream.spark.sink.writer",
    "millstream.spark.source.batch_planner",
    "millstream.spark.source.batch_sizer",
    "millstream.spark.source.group_partition_reader",
)


@contextmanager
def quick_spark_pythons() -> Iterator[None]:
    """Java started in this block starts its sources and sinks quickly, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="pythons-") as folder:
        path = str(Path(folder) / "socket")
        command = [sys.executable, "-m", "tests.support.spark_pythons", path]
        settings = {
            "PYTHONHASHSEED": "0",
            "OPENBLAS_NUM_THREADS": "1",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(
            command, cwd=Path(__file__).parents[2], env={**os.environ, **settings}, **pipes
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.read(1) == b"!", "it did not start"
            try:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv(VARIABLE, path)
                    yield
            finally:
                process.stdin.close()


def serve(path: str) -> None:
    """Fork a process for each that asks, until stdin is closed."""
    for name in _MODULES:
        with suppress(ImportError):  # another PySpark
            importlib.import_module(name)
    get_ready_to_fork()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that none has to be waited for
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(100)
        os.write(1, b"!")
        while listener.fileno() in select.select([listener.fileno(), 0], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _work_for(connection)
            connection.close()


def _work_for(connection: socket.socket) -> None:
    """Do what the process at the other end of the connection was started for; does not return."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        size, pipes, _, _ = socket.recv_fds(connection, 8, 3)
        environment, folder, sys.path[:], command = marshal.loads(receive(connection, int.from_bytes(size)))
        take_place(environment, folder, pipes)
        sys.argv = command[command.index("-m") + 1 :]
        if sys.argv[0] != DAEMON:  # a daemon ends with its stdin, and forks, so it has no thread
            threading.Thread(target=_end_with, args=[connection], daemon=True).start()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code & 255 if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as Python ends with any
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
            connection.sendall(bytes([code]))
        os._exit(code)


def _end_with(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.recv(1)
    os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
