"""The wheel: how it is built, and, as a program, its installation with each extra on each Python (`make wheels`).

    python -m tests.support.wheels [--python 3.12] [--extra spark]

Builds the wheel and the archive of the sources into build/dist, has `twine check` look at them, and installs the wheel
into one new environment for each Python and extra, which then has to do what `tests.support.installed` asks for. The
table, with the time and the megabytes of each installation, is in build/wheels.md. Exits 1 if anything failed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.support.pythons import TESTED, find_python

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
CHECKS = ROOT / "tests/support/installed.py"
NOT_FOR_USERS = {"dev", "docs"}
_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")


def build(folder: Path, *targets: str, root: Path = ROOT) -> list[Path]:
    """Build `wheel`, `sdist` or both of a clone into an empty `folder`, with the build backend of this environment."""
    options = [option for target in targets for option in ("-t", target)]
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), *options, root=root)
    return sorted(folder.iterdir())


def run(*command: str, root: Path = ROOT, path: str | None = None) -> str:
    """Run a command from the root of a clone, with this PATH; return what it printed. Raises RuntimeError if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PATH"] = path
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def extras() -> list[str]:
    """The extras that are meant for users, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [name for name in project["optional-dependencies"] if name not in NOT_FOR_USERS]


def new_environment(python: str, folder: Path) -> str:
    """Make an empty environment; return its Python."""
    run(python, "-m", "venv", "--clear", str(folder))
    return str(folder / "bin/python")


def install(own: str, *packages: str) -> None:
    """Install packages into the environment of the Python `own`."""
    run(own, *_PIP, "install", *packages)


def reaches_index(python: str, package: str = "hiredis") -> bool:
    """Whether pip finds an index from here that has the package."""
    command = [python, "-m", "pip", "index", "versions", package]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def link_requirements(own: str, extra: str = "") -> None:
    """Put what the installed wheel asks for into the environment of the Python `own`, and nothing else.

    The packages are those of the Python that runs here, by symbolic links, so this needs no index.
    """
    (site,) = Path(own).parents[1].glob("lib/python*/site-packages")
    wanted = [("millstream", extra)]
    done: set[tuple[str, str]] = set()
    while wanted:
        name, extra = wanted.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        found = next(iter(distributions(name=name, path=[str(site)] if name == "millstream" else sys.path)))
        for requirement in map(Requirement, found.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                wanted += [(requirement.name, ""), *((requirement.name, one) for one in requirement.extras)]
        if name != "millstream":  # which is there
            for file in found.files or ():
                if ".." not in file.parts and not (site / file).exists():
                    (site / file).parent.mkdir(parents=True, exist_ok=True)
                    (site / file).symlink_to(str(file.locate()))


def try_install(wheel: Path, python: str, extra: str, *, path: str | None = None) -> tuple[float, float]:
    """Install the wheel into an environment of its own, and use it. Returns the seconds and megabytes that it took.

    `path`: the PATH while it is used.
    """
    with tempfile.TemporaryDirectory(prefix="millstream-wheel-") as folder:
        own = new_environment(python, Path(folder))
        before = megabytes(Path(folder))
        started = time.monotonic()
        install(own, f"{wheel}[{extra}]" if extra else str(wheel))
        seconds = time.monotonic() - started
        size = megabytes(Path(folder)) - before
        use(own, *([extra] if extra else ()), path=path)
        return seconds, size


def use(own: str, *extras: str, path: str | None = None) -> dict[str, Any]:
    """Do what `tests.support.installed` asks for, with the environment of the Python `own`; return what it found."""
    program = str(Path(own).with_name("millstream"))
    found: dict[str, Any] = json.loads(run(own, "-P", str(CHECKS), program, *extras, path=path))
    return found


def megabytes(folder: Path) -> float:
    """What the files below `folder` occupy."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_blocks * 512 for path in files) / 1e6


def check_distributions(built: list[Path]) -> None:
    """`twine check --strict`: is the metadata one that an index accepts, and can it show the long description?"""
    own = new_environment(sys.executable, BUILD / "twine")
    install(own, "twine>=6.1")
    say(run(own, "-m", "twine", "check", "--strict", *map(str, built)).strip())


def rows(versions: list[str], wanted: list[str], wheel: Path) -> Iterator[tuple[str, bool]]:
    """A row of the table for each Python and extra, and whether it works."""
    for version in versions:
        python = find_python(version)
        for extra in wanted:
            name = f"| {version} | {extra or 'none'} |"
            if python is None:
                yield f"{name} | | not tried: there is no Python {version} here |", True
                continue
            try:
                seconds, size = try_install(wheel, python, extra)
            except RuntimeError as error:
                say(str(error))
                yield f"{name} | | **failed** |", False
            else:
                yield f"{name} {seconds:.0f} | {size:.0f} | works |", True


def say(text: str) -> None:
    """Show progress at once."""
    print(re.sub(r"\x1b\[\d*m", "", text), flush=True)  # noqa: T201 - a program's output


def main() -> int:
    """Build, check, and install everywhere."""
    parser = argparse.ArgumentParser(prog="make wheels")
    parser.add_argument("--python", action="append", choices=TESTED, help="only this version; repeatable")
    parser.add_argument("--extra", action="append", choices=["none", *extras()], help="only this extra; repeatable")
    chosen = parser.parse_args()
    shutil.rmtree(BUILD / "dist", ignore_errors=True)
    built = build(BUILD / "dist", "sdist", "wheel")
    check_distributions(built)
    wanted = ["" if extra == "none" else extra for extra in chosen.extra or ["none", *extras()]]
    wheel = next(path for path in built if path.suffix == ".whl")
    table = ["| Python | extra | seconds | MB | result |", "|---|---|---|---|---|"]
    succeeded = True
    say("\n".join(table))
    for row, works in rows(chosen.python or list(TESTED), wanted, wheel):
        say(row)
        table.append(row)
        succeeded &= works
    (BUILD / "wheels.md").write_text("\n".join(table) + "\n")
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
