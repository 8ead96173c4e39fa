"""Real SQL databases for tests: a file of SQLite, and a PostgreSQL server of their own where it is installed."""

import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.requirements import skip_without
from tests.support.waiting import FAIL_SAFE_S, eventually


@dataclass(frozen=True)
class Database:
    """Where a database is; plain text, so that other processes can be told."""

    kind: str
    place: str

    @property
    def paramstyle(self) -> str:
        """That of its driver."""
        if self.kind == "sqlite":
            return sqlite3.paramstyle
        import psycopg  # takes as long as all else that a process of SQLite imports

        return psycopg.paramstyle

    @property
    def mark(self) -> str:
        """A parameter's place in the test's own statements."""
        return "?" if self.kind == "sqlite" else "%s"

    def connect(self) -> Any:
        """A connection of its driver."""
        if self.kind == "sqlite":
            return sqlite3.connect(self.place, timeout=FAIL_SAFE_S, check_same_thread=False)
        import psycopg

        return psycopg.connect(self.place)


@contextmanager
def postgres_server() -> Iterator[str]:
    """The address of a PostgreSQL server that ends with the block, or with the process. Requires its programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    search = os.pathsep.join([*map(str, reversed(found)), os.environ.get("PATH", "")])
    initdb, postgres, setpriv = (shutil.which(name, path=search) for name in ("initdb", "postgres", "setpriv"))
    skip_without(initdb and postgres, "PostgreSQL's server is not installed: apt-get install postgresql")
    skip_without(setpriv, "setpriv is not on PATH: apt-get install util-linux")
    assert initdb
    assert postgres
    assert setpriv
    folder = Path(tempfile.mkdtemp(prefix="ms-sql-"))
    data = folder / "data"
    # PostgreSQL refuses to run as root.
    as_user = [setpriv]
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody")
        as_user += ["--reuid=nobody", "--clear-groups"]
    try:
        setup = [*as_user, initdb, "--pgdata", str(data), "--username=test", "--auth=trust", "--no-sync"]
        subprocess.run(setup, check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=FAIL_SAFE_S)
        command = [*as_user, "--pdeathsig=QUIT", postgres, "-D", str(data), "-k", str(folder)]
        command += ["-c", "listen_addresses=", "-c", "fsync=off"]
        with (folder / "log").open("w") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            address = f"host={folder} user=test dbname=postgres connect_timeout={round(FAIL_SAFE_S)}"
            _wait_for(address, server, folder / "log")
            yield address
        finally:
            server.send_signal(signal.SIGQUIT)
            server.wait(FAIL_SAFE_S)
    finally:
        shutil.rmtree(folder)


def _wait_for(address: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    import psycopg

    def answers() -> bool:
        try:
            psycopg.connect(address).close()
        except psycopg.OperationalError:
            assert server.poll() is None, log.read_text()
            return False
        return True

    eventually(answers, "PostgreSQL", log=log.read_text)
