"""The daemon that forks Spark's Python workers: they have the modules of millstream's tasks, and get tasks without delay.

Spark's own daemon (`pyspark.daemon`) imports nothing before it forks: a thread that a library has started is missing
in the child, and may have held a lock. This one sets the libraries to start no threads, and forks only if none runs.
Otherwise it continues as Spark's own daemon. Spark starts it by `spark.python.daemon.module`.
"""

import gc
import importlib
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_WORKER = "pyspark.worker"
"""The worker that runs tasks. Spark has a daemon for each of its other workers, too: these start rarely."""

_MODULES = (
    _WORKER,
    "pandas",  # pyarrow imports it as soon as it makes an array of a list
    "pyarrow",
    "millstream.spark.engine.entry_points",
    "millstream.spark.source.partition_reader",
    "millstream.spark.sink.writer",
)
_WITHOUT_DELAYS = [getattr(socket, name) for name in ("TCP_NODELAY", "TCP_QUICKACK") if hasattr(socket, name)]
"""Linux forgets TCP_QUICKACK, which only it has, once the process has answered: it has to be set for each task."""
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


def main() -> None:
    """Import what tasks need and fork workers, or run Spark's own daemon."""
    if sys.argv[1:] == [_WORKER]:
        preload()
        if thread_count() != 1:
            os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", _WORKER])
    from pyspark import daemon

    daemon.worker = without_delays(daemon.worker)  # type: ignore[assignment]  # other names of its parameters
    daemon.manager()


def preload() -> None:
    """Import the modules of tasks without starting a thread, unless the environment asks for threads."""
    added = {name: value for name, value in _NO_THREADS.items() if name not in os.environ}
    os.environ.update(added)
    with suppress(ImportError):  # the task that needs it says what is missing
        for name in _MODULES:
            importlib.import_module(name)
    for name in added:
        del os.environ[name]
    if "numpy" in sys.modules:  # else the random numbers of all workers would be the same; `random` does this itself
        os.register_at_fork(after_in_child=sys.modules["numpy"].random.seed)
    gc.freeze()


def without_delays(run_task: Callable[[socket.socket, bool], int]) -> Callable[[socket.socket, bool], int]:
    """Return `run_task`, which runs a task for Java at the other end of a connection, and nothing waits on the connection.

    Java sends a task in two parts, and TCP holds the second one back until the first is acknowledged (Nagle's algorithm).
    A worker has nothing to answer to the first, and Linux acknowledges it 40 ms later if earlier answers were quick.
    """

    def run(connection: socket.socket, authenticated: bool) -> int:
        if connection.family != socket.AF_UNIX:  # spark.python.unix.domain.socket.enabled
            for option in _WITHOUT_DELAYS:
                connection.setsockopt(socket.IPPROTO_TCP, option, 1)
        return run_task(connection, authenticated)

    return run


def thread_count() -> int | None:
    """Return the number of threads of this process; None if the system does not say."""
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return None


if __name__ == "__main__":
    main()
