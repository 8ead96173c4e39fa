"""A service of `millstream` as a process: `serve`, `master` or `consumer`."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.commandline import start
from tests.support.processes import end
from tests.support.waiting import FAIL_SAFE_S


class ServiceProcess:
    """`millstream COMMAND OPTIONS` with its HTTP server on any free port. A context manager that kills it at the end.

    Its stderr goes to `log`, if there is one. Once it has started, `process` is there, `started` has the line that it
    printed, and `url` its address.
    """

    process: subprocess.Popen[bytes]
    started: dict[str, Any]
    url: str

    def __init__(
        self,
        command: Sequence[str],
        options: Sequence[str],
        redis_url: str,
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._command = [
            *command,
            "--port",
            "0",
            "--json",
            *options,
        ]  # the options may name a port: the last one counts
        self._redis_url = redis_url
        self._env = env
        self._log = log

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stderr = stack.enter_context(self._log.open("wb")) if self._log else None
            self.process = start(*self._command, url=self._redis_url, env=self._env, stderr=stderr)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self._command} did not start\n{self.said()}"
        self.started = json.loads(line)
        self.url = self.started["url"]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(FAIL_SAFE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def said(self) -> str:
        """What its log has, if it has a log."""
        return self._log.read_text() if self._log else ""

    def stop(self) -> int:
        """SIGTERM; return the exit code."""
        return end(self.process)


def get(url: str) -> httpx.Response:
    """One page of a service on this machine, whatever proxy the environment names; it speaks no TLS."""
    return httpx.get(url, timeout=FAIL_SAFE_S, trust_env=False, verify=False)


def http_client(url: str, headers: Mapping[str, str] | None = None) -> httpx.Client:
    """A client of a service on this machine, whatever proxy the environment names."""
    return httpx.Client(base_url=url, headers=headers, timeout=FAIL_SAFE_S, trust_env=False, verify=False)
