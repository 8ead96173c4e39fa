"""Runs `millstream` in tests, in this process or as a separate one."""

import json
import os
import pty
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from typer.testing import CliRunner

from millstream.cli.main import main
from tests.support.quick_programs import Program
from tests.support.waiting import FAIL_SAFE_S

PROGRAM = (sys.executable, "-m", "millstream.cli.main")
_NO_CLIENTS = range(30_000, 32_768)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The output and exit code of a command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Its output as one JSON value."""
        assert self.out, f"exit code {self.code} and no output: {self.err}"
        return json.loads(self.out)

    def json_lines(self) -> list[Any]:
        """Its output as one JSON value per line."""
        return [json.loads(line) for line in self.out.splitlines()]


def call(*args: str, url: str | None = None, stdin: bytes = b"") -> Outcome:
    """Run `millstream ARGS` in this process. Raises exceptions that the command does not handle."""
    result = CliRunner().invoke(main, args, input=stdin, env={"MILLSTREAM_URL": url}, catch_exceptions=False)
    return Outcome(code=result.exit_code, out=result.stdout, err=result.stderr)


def run(*args: str, url: str | None = None, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Outcome:
    """Run `millstream ARGS` as a process, to its end."""
    with start(*args, url=url, env=env, stdin=subprocess.PIPE) as process:
        try:
            return ended(process, stdin)
        finally:
            process.kill()


def start(
    *args: str,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stderr: int | IO[bytes] | None = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start `millstream ARGS` as a process; the caller ends it. Without a `stderr` it has that of this process."""
    return Program([*PROGRAM, *args], env=environment(url, env), stdin=stdin, stdout=subprocess.PIPE, stderr=stderr)


@contextmanager
def running(
    *args: str, url: str | None = None, stdin: int = subprocess.DEVNULL, stderr: int | IO[bytes] = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    """`start`, and kill the process at the end of the block."""
    with start(*args, url=url, stdin=stdin, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[bytes], stdin: bytes | None = None) -> Outcome:
    """Wait for the end of a process; return its remaining output."""
    out, err = process.communicate(stdin, timeout=FAIL_SAFE_S)
    return Outcome(code=process.returncode, out=out.decode(), err=(err or b"").decode())


def in_a_terminal(
    *args: str,
    url: str,
    env: Mapping[str, str] | None = None,
    answer: bytes = b"",
    until: bytes = b"\0",
    times: int = 1,
) -> Outcome:
    """What `millstream ARGS` shows on a terminal on which `answer` is typed once it asks.

    Ctrl-C is pressed when it has shown `until` so many times.
    """
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*PROGRAM, *args], env=environment(url, env), stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 65_536)
            except OSError:  # its last copy of the terminal is closed
                break
            if not chunk:
                break
            shown += chunk
            if answer and b"[y/N]" in shown:
                os.write(ours, answer)
                answer = b""
            if shown.count(until) >= times:
                process.send_signal(signal.SIGINT)
                until = b"\0"
        process.wait(FAIL_SAFE_S)
    finally:
        os.close(ours)
    return Outcome(code=process.returncode, out=shown.decode(), err="")


def environment(url: str | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with MILLSTREAM_URL set or removed."""
    rest = {name: value for name, value in os.environ.items() if name != "MILLSTREAM_URL"}
    return {**rest, **({"MILLSTREAM_URL": url} if url else {}), **(more or {})}


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that no other program gets within the block; a server that binds to it explicitly can."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: it is bound, but does not listen
        found.bind(("127.0.0.1", 0))
        yield int(found.getsockname()[1])


def free_port() -> int:
    """A port of 127.0.0.1 that no program listens on, outside the ranges of servers and of outgoing connections."""
    while True:
        port = secrets.choice(_NO_CLIENTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
