"""Running `millstream` in tests: in this process, or as a process of its own."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from millstream.commands.cli import main

PROGRAM = (sys.executable, "-m", "millstream.commands.cli")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Its output, one JSON value."""
        assert self.out, f"exit code {self.code} and no output: {self.err}"
        return json.loads(self.out)

    def json_lines(self) -> list[Any]:
        """Its output, a JSON value per line."""
        return [json.loads(line) for line in self.out.splitlines()]


def call(*args: str, url: str | None = None) -> Outcome:
    """Run `millstream ARGS` in this process. What it raises beyond its own errors is raised here."""
    result = CliRunner().invoke(main, args, env={"MILLSTREAM_URL": url}, catch_exceptions=False)
    return Outcome(code=result.exit_code, out=result.stdout, err=result.stderr)


def run(*args: str, url: str | None = None, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Outcome:
    """Run `millstream ARGS` as a process of its own."""
    done = subprocess.run(
        [*PROGRAM, *args], input=stdin, env=environment(url, env), capture_output=True, timeout=120, check=False
    )
    return Outcome(code=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())


def start(*args: str, url: str | None = None, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start `millstream ARGS` as a process of its own; the caller ends it."""
    return subprocess.Popen(
        [*PROGRAM, *args], env=environment(url), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def environment(url: str | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with MILLSTREAM_URL as asked."""
    rest = {name: value for name, value in os.environ.items() if name != "MILLSTREAM_URL"}
    return {**rest, **({"MILLSTREAM_URL": url} if url else {}), **(more or {})}


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
