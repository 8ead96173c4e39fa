"""A Spark Connect server in a process of its own, on 127.0.0.1 only."""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil
import pyspark

from tests.support.commandline import free_port
from tests.support.processes import await_end, descendants, end
from tests.support.waiting import FAIL_SAFE_S, eventually

SPARK_HOME = Path(os.environ.get("SPARK_HOME", Path(pyspark.__file__).parent))
PROGRAM = "org.apache.spark.sql.connect.service.SparkConnectServer"


class ConnectServer:
    """Started and stopped by `with`; `folder` keeps its log, its tables and all that it drops where it is started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.remote = f"sc://127.0.0.1:{self.port}"
        self.warehouse = folder / "warehouse"

    def __enter__(self) -> "ConnectServer":
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.python.authenticate.socketTimeout": "120s",
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.warehouse.dir": str(self.warehouse),
            "spark.ui.enabled": "false",
        }
        conf = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
        submit = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[1]"]
        with (self.folder / "server.log").open("w") as log:
            self._process = subprocess.Popen(
                [*submit, *conf, "--class", PROGRAM, "spark-internal"],
                env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(SPARK_HOME)},
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait()
            assert {address.removeprefix("::ffff:") for address in self._addresses()} == {"127.0.0.1"}
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        workers = descendants(self._process)
        try:
            end(self._process)
            await_end(workers)
        finally:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        """The end of what it said."""
        return (self.folder / "server.log").read_text()[-5000:]

    def _addresses(self) -> set[str]:
        """Where it listens."""
        found = psutil.Process(self._process.pid).net_connections("inet")
        return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}

    def _wait(self) -> None:
        def answers() -> bool:
            assert self._process.poll() is None, self.log()
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), FAIL_SAFE_S):
                return True
            return False

        eventually(answers, "the server", log=self.log)
