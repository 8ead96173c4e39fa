"""What every installed millstream must be able to do. Runs in its environment, which need not have the tests:

    python -P tests/support/installed.py PROGRAM [EXTRA ...]          # all of it
    python -P tests/support/installed.py PROGRAM --imports [EXTRA ...]
    python -P tests/support/installed.py PROGRAM --message

PROGRAM is the command `millstream` of that environment, EXTRA what was installed with it. The verdict is the exit code;
what failed is on stderr, and stdout has one line of JSON. Needs a redis-server on PATH, or the extra `server`.
"""

import importlib
import json
import pkgutil
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import millstream
from millstream.demo.environment import find_example

WITHIN_S = 180
PUBLISHED = {"customer": "ann", "amount": 10}
OUTPUT = {"customer": "ann", "sum": "10.0"}
TRANSITIVE = {
    "pyspark": ("py4j",),
    "pandas": ("numpy",),
}  # what we import too, and no extra names, since another package depends on it


def main(program: str, *extras: str) -> None:
    """Check all of it; print what was found."""
    program = str(Path(program).absolute())
    version = answer(program, "--version")
    require(version == f"millstream {millstream.__version__}", f"--version says {version!r}")
    require(metadata.version("millstream") == millstream.__version__, "the metadata has another version")
    require("worker" in answer(program, "--help"), "--help names no command")
    here = Path(millstream.__file__).parent
    require(find_example().is_relative_to(here), "the app of `millstream demo` is not the installed one")
    lacking = {} if "--message" in extras else import_everything(not_installed(extras))
    server: str | None = None
    if "--imports" not in extras:
        server, result = one_message(program)
        require(result == OUTPUT, f"a worker of examples.shop made {result} of {PUBLISHED}")
    print(json.dumps({"at": str(here), "lacking": lacking, "server": server}))  # noqa: T201 - its result


def require(holds: bool, what: str) -> None:
    """End with `what`, unless it holds."""
    if not holds:
        sys.exit(f"installed: {what}")


def answer(*command: str) -> str:
    """What a command prints; it must succeed."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=WITHIN_S).stdout.strip()


def not_installed(extras: tuple[str, ...]) -> set[str]:
    """The modules that the package's own metadata expects from extras that were not asked for."""
    here: set[str] = set()
    elsewhere: set[str] = set()
    for requirement in metadata.requires("millstream") or ():
        name = re.match(r"\w+", requirement)  # opentelemetry-api is imported as `opentelemetry`
        extra = re.search(r"extra == '(\w+)'", requirement)
        assert name is not None
        (here if extra is None or extra[1] in extras else elsewhere).update({name[0], *TRANSITIVE.get(name[0], ())})
    return elsewhere - here


def import_everything(may_be_missing: set[str]) -> dict[str, str]:
    """Import each module of the package; tell which of them lack which module. It must be one of `may_be_missing`."""
    lacking = {}
    for name in module_names():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            top = (error.name or "").partition(".")[0]
            require(top in may_be_missing, f"{name} needs {error.name}, which no extra that is left out has")
            lacking[name] = top
    return lacking


def module_names() -> Iterator[str]:
    """Every module of the packages, by the files that are there, since some packages cannot be imported."""
    site = Path(millstream.__file__).parents[1]
    for package in ("millstream", "pyspark_millstream", "pyspark_millstream_state"):
        yield from names_below(package, site / package)


def names_below(name: str, folder: Path) -> Iterator[str]:
    """The package `name`, and every module in its folder."""
    yield name
    for found in pkgutil.iter_modules([str(folder)]):
        if found.ispkg:
            yield from names_below(f"{name}.{found.name}", folder / found.name)
        else:
            yield f"{name}.{found.name}"


def one_message(program: str) -> tuple[str, dict[str, str]]:
    """The program of the server, and what a worker makes of one message: the fields of its output."""
    from millstream.producer import Producer
    from millstream.redis_client import EmbeddedServer

    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder:
        with Producer(server.url) as producer:
            producer.publish("orders", PUBLISHED)
        command = [program, "worker", "millstream.examples.shop:app", "--url", server.url]
        with subprocess.Popen(command, cwd=folder, stdout=sys.stderr) as worker:
            try:
                tail = ("tail", "totals", "--from", "earliest", "--limit", "1", "--json", "--url", server.url)
                entry = json.loads(answer(program, *tail))
            finally:
                worker.send_signal(signal.SIGTERM)
        require(worker.returncode == 0, f"the stopped worker ended with {worker.returncode}")
        return server.program.path, {name: entry["fields"][name] for name in OUTPUT}


if __name__ == "__main__":
    main(*sys.argv[1:])
