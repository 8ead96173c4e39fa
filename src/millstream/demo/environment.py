"""The demo's environment: the app's file, the data folder, and Redis."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from millstream.demo.audit import KEYS, OUTPUT
from millstream.errors import ConfigError
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer

_MARKER = ".millstream-demo"


def find_example() -> Path:
    """Find the app: in the folder `examples` of an installed millstream, or of the clone."""
    here = Path(__file__).resolve()
    paths = (here.parents[1] / "examples" / "airline.py", here.parents[3] / "examples" / "airline.py")
    for path in paths:
        if path.is_file():
            return path
    raise ConfigError(f"the demo's app is missing; it should be {paths[0]}: reinstall millstream")


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """Create `folder`, or empty it if an earlier demo created it, and lock it against other demos.

    Raises ConfigError if it holds other files, is in use, or cannot be written.
    """
    folder = folder.absolute()
    with _claim(folder):
        yield folder


def _claim(folder: Path) -> IO[str]:
    """Lock and empty the folder; closing the returned file releases the lock."""
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / _MARKER).exists():
            raise ConfigError(f"{folder} is not empty and was not created by the demo; give another --data-dir")
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            marker = stack.enter_context((folder / _MARKER).open("a"))
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(folder)
            stack.pop_all()
            return marker
    except BlockingIOError as error:
        raise ConfigError(f"another demo runs in {folder}; give another --data-dir") from error
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be used ({error}); give another --data-dir") from error


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _MARKER:
            path.unlink()


@contextmanager
def embedded_server(data_dir: Path, *, keep: bool) -> Iterator[EmbeddedServer]:
    """Run a redis-server with its data below `data_dir`. Removes the data unless `keep`.

    It never rewrites its append-only file (`auto-aof-rewrite-percentage 0`): the file of a run has a few hundred MB, and
    each rewrite would take a core from the pipeline.
    """
    try:
        with EmbeddedServer(data_dir=data_dir / "redis", extra={"auto-aof-rewrite-percentage": "0"}) as server:
            yield server
    finally:
        if not keep:
            shutil.rmtree(data_dir / "redis", ignore_errors=True)


def _own_keys() -> list[str]:
    return [KEYS.stream, OUTPUT, KEYS.meta, KEYS.offsets, KEYS.state, KEYS.crashes, KEYS.dead_letters]


def require_unused(client: Client) -> None:
    """Raise ConfigError if Redis already has a key that the demo writes."""
    for key in _own_keys():
        if client.execute("EXISTS", key):
            raise ConfigError(f"this Redis already has a key {key!r}; give the --url of an empty database")


def clean(client: Client) -> None:
    """Remove the demo's keys from Redis."""
    for key in _own_keys():
        client.execute("UNLINK", key)
