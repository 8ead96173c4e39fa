"""App archive: the app's own code as one zip, which the driver serves to executors on other machines.

Python, millstream and the app's dependencies must be installed there: see `docs/spark-cluster.md`.
"""

import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from millstream.errors import ConfigError

_ZIPS = (".zip", ".egg")


def ship(spark: SparkSession, folder: Path, more: Sequence[str] = ()) -> None:
    """Send the modules loaded from the app's `folder`, and `more` modules, packages and zips, to every executor.

    Raises ConfigError if two of them have the same name.
    """
    context = spark.sparkContext
    extra = [Path(path).resolve() for path in more]
    archive = Path(str(context._temp_dir)) / "app.zip"  # deleted with the session
    pack([*loaded_modules(folder), *(path for path in extra if path.suffix not in _ZIPS)], archive)
    for path in (archive, *(path for path in extra if path.suffix in _ZIPS)):
        context.addPyFile(str(path))


def loaded_modules(folder: Path) -> list[Path]:
    """The modules, and whole packages, that this process has imported from `folder`."""
    found = set()
    for name, module in sys.modules.copy().items():
        origin = getattr(module, "__file__", None)
        path = folder.joinpath(*name.split("."))
        if origin is not None and Path(origin) in (path.with_suffix(".py"), path / "__init__.py"):
            package = folder / name.partition(".")[0]
            file = package.with_suffix(".py")
            found.add(file if Path(origin) == file else package)
    return sorted(found)


def pack(sources: Iterable[Path], into: Path) -> None:
    """Write an importable zip of modules and packages. Raises ConfigError as `ship`."""
    sources_by_name: dict[str, Path] = {}
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in sources:
            if (first := sources_by_name.setdefault(source.name, source)) != source:
                raise ConfigError(f"{first} and {source} would be the same module; rename one of them")
            for path in _contents(source):
                archive.write(path, path.relative_to(source.parent))


def _contents(source: Path) -> Iterator[Path]:
    yield source
    if source.is_dir():
        # Folders too: Python finds a package without __init__.py in a zip only by its folder's entry.
        yield from (path for path in sorted(source.rglob("*")) if "__pycache__" not in path.parts)
