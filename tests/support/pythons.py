"""The versions of Python that millstream is tested on, and where this machine has them.

python -m tests.support.pythons 3.12    # prints the program
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TESTED = ("3.11", "3.12", "3.13")


def find_python(version: str) -> str | None:
    """The program of this version of Python: on PATH, or else among those of pyenv. None if there is none."""
    return next((found for found in _candidates(version) if _is(found, version)), None)


def _candidates(version: str) -> Iterator[str]:
    name = f"python{version}"
    if on_path := shutil.which(name):
        yield on_path
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/{name}"), reverse=True))


def _is(program: str, version: str) -> bool:
    """Whether it runs, has what environments are made with, and is what its name says; pyenv's shims may be neither."""
    code = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([program, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version


if __name__ == "__main__":
    sys.exit(print(found) if (found := find_python(sys.argv[1])) else f"there is no Python {sys.argv[1]} here")  # noqa: T201 - its result
