"""Checks of this machine: Python, the parser of Redis' replies, Java and PySpark. They need no Redis."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from millstream.admin.findings import Finding

_MIN_PYTHON = (3, 11)
_MIN_JAVA = 17
_JAVA_TIMEOUT_S = 20.0
_COMPARED: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": lambda found, bound: found >= bound,
    "<": lambda found, bound: found < bound,
    "==": lambda found, bound: found[: len(bound)] == bound,
}


def check_python() -> Iterator[Finding]:
    """The version of Python."""
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _MIN_PYTHON:
        yield Finding(
            check="python",
            severity="problem",
            what=f"Python {found} is too old",
            why=f"millstream needs {'.'.join(map(str, _MIN_PYTHON))} or later",
        )
    else:
        yield Finding(check="python", severity="ok", what=f"Python {found}")


def check_hiredis() -> Iterator[Finding]:
    """The C parser of Redis' replies."""
    if find_spec("hiredis") is None:
        yield Finding(
            check="hiredis",
            severity="problem",
            what="hiredis is not installed",
            why="millstream reads Redis' replies with it",
            mend=(f"{sys.executable} -m pip install hiredis",),
        )
    else:
        yield Finding(check="hiredis", severity="ok", what=f"hiredis {version('hiredis')}")


def check_spark() -> Iterator[Finding]:
    """PySpark of a supported version, and a Java for it. A machine without PySpark runs workers only."""
    try:
        found = version("pyspark")
    except PackageNotFoundError:
        yield Finding(check="spark", severity="ok", what="PySpark is not installed; only `millstream run` needs it")
        return
    wanted = _requirement("pyspark")
    if not _satisfies(found, wanted):
        yield Finding(
            check="spark",
            severity="warning",
            what=f"PySpark {found} is not supported ({wanted} is)",
            why="`millstream run`, source and sink may fail",
            mend=(f"{sys.executable} -m pip install 'pyspark{wanted}'",),
        )
        return
    java = _java_version()
    if java is None or java < _MIN_JAVA:
        what, mend = _unsuitable_java(java)
        yield Finding(
            check="spark",
            severity="warning",
            what=f"PySpark {found} is installed, and {what}",
            why=f"Spark needs Java {_MIN_JAVA} or later; workers need none",
            mend=(mend,),
        )
    else:
        yield Finding(check="spark", severity="ok", what=f"PySpark {found}, Java {java}")


MACHINE_CHECKS: Mapping[str, Callable[[], Iterable[Finding]]] = {
    "python": check_python,
    "hiredis": check_hiredis,
    "spark": check_spark,
}


def _requirement(package: str) -> str:
    """The versions of a package that this installation of millstream supports, as pip writes them."""
    found = (re.match(rf"{package}([<>=!~][^;\s]*)", text) for text in requires("millstream") or ())
    return next((one[1] for one in found if one), "")


def _satisfies(found: str, wanted: str) -> bool:
    parts = _numbers(found)
    bounds = (re.match(r"([<>=]+)([\d.]+)", one) for one in wanted.split(","))
    return all(_COMPARED[one[1]](parts, _numbers(one[2])) for one in bounds if one and one[1] in _COMPARED)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])))


def _unsuitable_java(found: int | None) -> tuple[str, str]:
    """What is wrong with the Java that Spark would start, of this version, or with none; and what mends it."""
    install = "apt-get install openjdk-17-jre-headless"
    home = os.environ.get("JAVA_HOME")
    if found is not None:
        return f"Java {found} is too old in JAVA_HOME or PATH", install
    if home and not (Path(home) / "bin" / "java").exists():
        return f"JAVA_HOME is {home!r}, which has no bin/java", "unset JAVA_HOME" if shutil.which("java") else install
    return "there is no Java in JAVA_HOME or PATH", install


def _java_version() -> int | None:
    """The major version of the Java that Spark would start; None if there is none."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    return _version_of(java) if java else None


@cache  # a process that diagnoses more than once starts it once
def _version_of(java: str) -> int | None:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(found[1]) if found else None
