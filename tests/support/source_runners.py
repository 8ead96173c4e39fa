"""Quick starts of the Python that Spark starts for each source of each query of the shared session.

Spark runs the module `python_streaming_source_runner` in a new process each time, which imports PySpark, pyarrow and
redis-py: half a second of processor time. Here that process has one with all of it imported, started once, fork another
that does the work with its environment, its import path and its pipes, and waits for it; either ends with the other.
millstream is imported by each, as by what Spark starts. Tests that start Spark in other processes start it as it is.
"""

import gc
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

import psutil

RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
VARIABLE = "MILLSTREAM_TEST_SOURCE_RUNNERS"
"""Names the socket of the process that forks; without it Spark's processes do all themselves."""
SITE = f"""
import os, sys
if {VARIABLE!r} in os.environ and sys.orig_argv[-1] == {RUNNER!r}:
    path = sys.path[:]
    sys.path[:] = [one for one in path if one.startswith(sys.base_prefix)]  # archives take long to look through
    import marshal, socket
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.environ[{VARIABLE!r}])
        except OSError:
            sys.path[:] = path
            raise
        about = marshal.dumps((dict(os.environ), os.getcwd(), path))
        socket.send_fds(connection, [len(about).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(about)
        os._exit((connection.recv(1) or b"\\1")[0])
"""
"""The module `sitecustomize` of every Python that Spark starts."""

_MODULES = (
    "pyspark.worker_util",
    "pyspark.sql.datasource_internal",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.streaming.datasource",
    "pyspark.sql.worker.plan_data_source_read",
    "concurrent.futures.thread",
    "difflib",
    "encodings.idna",
    "msgspec",
    "redis",
    "redis.cluster",
    "redis.sentinel",
)


@contextmanager
def quick_source_runners() -> Iterator[None]:
    """Java started in this block starts its sources quickly, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="sources-") as folder:
        path = str(Path(folder) / "socket")
        command = [sys.executable, "-m", "tests.support.source_runners", path]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment, **pipes) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.read(1) == b"!", "it did not start"
            os.environ[VARIABLE] = path
            try:
                yield
            finally:
                del os.environ[VARIABLE]
                process.stdin.close()


def serve(path: str) -> None:
    """Fork a process for each that asks, until stdin is closed."""
    for name in _MODULES:
        with suppress(ImportError):  # another PySpark
            importlib.import_module(name)
    assert psutil.Process().num_threads() == 1, "a fork loses threads"
    gc.freeze()
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
        about = b""
        while len(about) < int.from_bytes(size, "big"):
            more = connection.recv(1 << 20)
            if not more:  # the process that asked has ended
                raise EOFError
            about += more
        environment, folder, sys.path[:] = marshal.loads(about)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
            os.close(pipe)
        threading.Thread(target=_end_with, args=[connection], daemon=True).start()
        sys.argv = [RUNNER]
        runpy.run_module(RUNNER, run_name="__main__", alter_sys=True)
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
