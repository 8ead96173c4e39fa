"""What a test run starts and writes is gone when it is over, however it ends.

Each run has a token, which every process it starts inherits in its environment, and a folder, in which all
temporary files are made. Programs that write over their environment (redis-server does, for its title) are known
by the folder, in which they work or which their command line names. A guardian, a small process in a session of
its own, waits for the end of a pipe that only the run holds. When the run dies, by Ctrl-C, `kill -9` or in order,
the kernel closes the pipe, and the guardian kills every process of the run and removes the folder.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

TOKEN_VARIABLE = "MILLSTREAM_TEST_RUN"


class RunGuardian:
    """Started by the process that owns the run. `end` removes what is left and names the processes."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="ms-"))
        self.folder.chmod(0o711)  # a server that must not run as root, as PostgreSQL, has its files below
        os.environ[TOKEN_VARIABLE] = self._token
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        read, self._write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=read,
            start_new_session=True,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
        )
        os.close(read)
        os.write(self._write, f"{self._token} {self.folder}\n".encode())

    def end(self, *, grace_s: float) -> list[str]:
        """Command lines of the processes that were still there `grace_s` after the last test; they are killed."""
        deadline = time.monotonic() + grace_s
        while (left := processes_of(self._token, self.folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        named = [f"{pid} {name}" for pid, name in left.items()]
        os.close(self._write)
        self._process.wait()
        return named


def processes_of(token: str, folder: Path) -> dict[int, str]:
    """Process id and command line of each process of a run, but for this one."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if int(process.name) != os.getpid() and _belongs(process, token, folder):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(process.name)] = command.strip()[:200]
    return found


def _belongs(process: Path, token: str, folder: Path) -> bool:
    return (
        f"{TOKEN_VARIABLE}={token}".encode() in (process / "environ").read_bytes().split(b"\0")
        or str(folder).encode() in (process / "cmdline").read_bytes()
        or (process / "cwd").readlink().is_relative_to(folder)
    )


def remove(token: str, folder: Path) -> None:
    """Kill every process of the run, also those that they start meanwhile, and remove its folder."""
    for _ in range(200):
        left = processes_of(token, folder)
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    token, folder = sys.stdin.readline().split(maxsplit=1)
    sys.stdin.read()  # ends when the run has
    remove(token, Path(folder.strip()))
