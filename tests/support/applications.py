"""An application of a user as a process: on uvicorn, as users start it."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.commandline import environment, reserved_port
from tests.support.processes import kill_with_descendants
from tests.support.service_process import http_client
from tests.support.waiting import FAIL_SAFE_S, eventually


@dataclass(frozen=True, kw_only=True)
class Application:
    """A running application: its process, its address, a client for it, and the file of its log."""

    process: subprocess.Popen[bytes]
    url: str
    http: httpx.Client
    log: Path

    def wait(self) -> int:
        """Wait for the end of its process; return the exit code."""
        return self.process.wait(FAIL_SAFE_S)


@contextmanager
def application(
    target: str, redis_url: str, log: Path, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[Application]:
    """`uvicorn TARGET OPTIONS` on a port of this machine, killed at the end of the block."""
    with reserved_port() as port:
        command = [sys.executable, "-m", "uvicorn", target, "--host", "127.0.0.1", "--port", str(port), *options]
        with serving(command, f"http://127.0.0.1:{port}", redis_url, log, env=env) as found:
            yield found


@contextmanager
def serving(
    command: list[str], url: str, redis_url: str | None, log: Path, *, env: Mapping[str, str] | None = None
) -> Iterator[Application]:
    """Run a program that serves at `url`, killed at the end of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment(redis_url, env), stdout=output, stderr=output)
    try:
        with http_client(url) as http:
            found = Application(process=process, url=url, http=http, log=log)
            eventually(lambda: _answers(found), "an answer of the application", log=log.read_text)
            yield found
    finally:
        kill_with_descendants(process)


def _answers(application: Application) -> bool:
    assert application.process.poll() is None, application.log.read_text()
    try:
        application.http.get("/")
    except httpx.TransportError:
        return False
    return True
