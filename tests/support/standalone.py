"""A standalone cluster of Spark's own: a master and workers on loopback, each a process in a folder of its own."""

import os
import subprocess
from pathlib import Path

import psutil

from tests.support.commandline import free_port
from tests.support.processes import descendants, kill_with_descendants
from tests.support.waiting import eventually

_MASTER, _WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
_EXECUTOR = "CoarseGrainedExecutorBackend"


class Standalone:
    """The processes of the cluster. A worker has one core, and room for one executor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._started = 0
        self.master: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """What drivers give as their master."""
        return f"spark://127.0.0.1:{self._port}"

    def start_master(self) -> None:
        """Start the master, also once more in the place of one that was killed."""
        self.master = self._start("master", _MASTER, "--port", str(self._port), "--webui-port", "0")
        eventually(lambda: "I have been elected leader" in self.log(), "the master", log=self.log)

    def start_worker(self) -> None:
        """Start one more worker."""
        options = ("--cores", "1", "--memory", "700m", "--webui-port", "0")
        self.workers.append(self._start("worker", _WORKER, *options, self.url))

    def _start(self, kind: str, *command: str) -> subprocess.Popen[bytes]:
        self._started += 1
        here = self._folder / f"{kind}-{self._started}"
        (here / "work").mkdir(parents=True)
        more = {"SPARK_WORKER_DIR": str(here / "work"), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m"}
        with (self._folder / f"{kind}.log").open("ab") as log:
            return subprocess.Popen(
                [f"{os.environ['SPARK_HOME']}/bin/spark-class", *command, "--host", "127.0.0.1"],
                stdout=log,
                stderr=log,
                cwd=here,
                env={**os.environ, **more},
            )

    def executors(self) -> list[psutil.Process]:
        """The executors of all workers that live."""
        found = []
        for worker in self.workers:
            for one in descendants(worker):
                try:
                    if _EXECUTOR in " ".join(one.cmdline()):
                        found.append(one)
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
        return found

    def kill_worker(self) -> None:
        """Kill the first worker with all that it has started, as when its machine is gone."""
        kill_with_descendants(self.workers.pop(0))

    def kill_master(self) -> None:
        """Kill the master."""
        assert self.master is not None
        kill_with_descendants(self.master)

    def stop(self) -> None:
        """Kill all of it."""
        for process in (*self.workers, *([self.master] if self.master else ())):
            kill_with_descendants(process)

    def log(self) -> str:
        """The end of what master and workers have said."""
        return "".join(path.read_text(errors="replace")[-20_000:] for path in self._folder.glob("*.log"))
