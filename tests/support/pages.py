"""Runs the code of pages as it is printed: files, consoles and scripts, with only ports and paths replaced."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.commandline import environment
from tests.support.processes import kill_with_descendants
from tests.support.waiting import FAIL_SAFE_S

ROOT = Path(__file__).parents[2]
REDIS = "127.0.0.1:6379"
"""The address that pages print."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"# ([\w.]+\.\w+)\n")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
_ID = re.compile(r"\b\d{13}(?:-\d+)?\b")
_AGE = re.compile(r"\b\d+(\.\d+)? ?(ms|s|min)\b")
_NO_COMMAND = ("$ pip ", "$ make ", "$ source ", "$ python3 -m venv")
_TRAP = "set -e\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of code of a page: its language and text."""

    language: str
    text: str

    @property
    def file(self) -> str:
        """The name in its first line, `# app.py`; "" if it has none."""
        found = _FILE.match(self.text)
        return found[1] if found else ""

    @property
    def commands(self) -> str:
        """The commands of a console, each after `$ `; lines after one that ends with a backslash belong to it."""
        lines: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ ") and not line.startswith(_NO_COMMAND):
                lines.append(line[2:])
            elif lines and lines[-1].endswith("\\"):
                lines.append(line)
        return "\n".join(lines)

    @property
    def outputs(self) -> list[str]:
        """What a console printed."""
        lines = self.text.splitlines()
        before = ["", *lines]
        shown = [line for line, last in zip(lines, before, strict=False) if not last.endswith("\\")]
        return [line for line in shown if line and not line.startswith("$ ") and line.strip() != "..."]


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, by its path below the root."""
    text = (ROOT / page).read_text()
    return [Block(language=language, text=code) for language, code in _BLOCK.findall(text)]


def write_files(page: str, folder: Path, replaced: Mapping[str, str] = MappingProxyType({})) -> dict[str, Path]:
    """Write the named files of a page to `folder`; return them by name."""
    files = {block.file: block.text for block in blocks_of(page) if block.file}
    for old, new in replaced.items():
        files = {name: text.replace(old, new) for name, text in files.items()}
    for name, text in files.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in files}


def run_python(
    page: str,
    names: Mapping[str, object] | None = None,
    replaced: Mapping[str, str] | None = None,
    *,
    only: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Run the Python blocks of a page, or only those numbers, from 0, one after another as one module; return its names.

    `names`: what the page's excerpts take for granted, such as a Spark session; `replaced`: addresses and paths.
    """
    module: dict[str, Any] = {"__name__": __name__, **(names or {})}
    texts = [block.text for block in blocks_of(page) if block.language == "python"]
    chosen = {number: texts[number] for number in (range(len(texts)) if only is None else only)}
    absent = [old for old in replaced or {} if not any(old in text for text in chosen.values())]
    assert not absent, f"{page}: not in its Python blocks: {absent}"
    for number, printed in chosen.items():
        text = printed
        for old, new in (replaced or {}).items():
            text = text.replace(old, new)
        exec(compile(text, f"{page}, Python block {number}", "exec"), module)
    return module


def consoles_of(page: str) -> list[Block]:
    """The consoles of a page that have commands to run."""
    return [block for block in blocks_of(page) if block.language == "console" and block.commands]


def shell_environment(url: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a shell that finds the program and this Redis."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return environment(url, {"PATH": path, **(more or {})})


def run_tests(page: str, folder: Path) -> str:
    """Run the named files of a page as tests, in `folder`; return what pytest prints. They must pass."""
    files = write_files(page, folder)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=folder,
        env={**os.environ, "CI": "1"},
        capture_output=True,
        text=True,
        timeout=FAIL_SAFE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def run_consoles(page: str, folder: Path, port: int) -> None:
    """Run all consoles of a page in one shell in `folder`, with Redis at `port`, and compare what they print.

    Other output may come in between, such as that of programs in the background. Raises AssertionError.
    """
    address = f"127.0.0.1:{port}"
    write_files(page, folder, {REDIS: address})
    consoles = consoles_of(page)
    script = "\n".join(block.commands for block in consoles).replace(REDIS, address)
    script = script.replace("millstream dev ", f"millstream dev --port {port} ")
    shell = subprocess.Popen(
        ["bash", "-c", _TRAP + script],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=shell_environment(f"redis://{address}/0"),
    )
    try:
        printed, errors = shell.communicate(timeout=FAIL_SAFE_S)
    except subprocess.TimeoutExpired as late:
        kill_with_descendants(shell)  # what runs in the background outlives a shell that is killed
        printed, errors = shell.communicate()
        raise AssertionError(f"{page}: its commands do not end\n{printed[-3000:]}\n{errors[-3000:]}") from late
    assert shell.returncode == 0, f"{page}: a command has failed\n{printed[-3000:]}\n{errors[-3000:]}"
    missing = not_printed([line for block in consoles for line in block.outputs], printed.splitlines())
    assert not missing, f"{page}: not printed: {missing}\n{printed[-3000:]}\n{errors[-3000:]}"


def not_printed(wanted: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The lines of `wanted` that were not printed, or not as often. Their order is that of keys side by side: none."""
    found = Counter(map(_plain, printed))
    found.subtract(map(_plain, wanted))
    return [line for line in wanted if found[_plain(line)] < 0]


def _plain(line: str) -> str:
    """A line without what differs from run to run: times, ids and ages, and widths that depend on them."""
    return " ".join(_AGE.sub("AGE", _ID.sub("ID", _TIME.sub("TIME", line))).split())
