"""What executors elsewhere need of an app's own code: one zip, which the driver serves to them.

Everything else, Python, millstream and what the app installs, has to be there: see `docs/spark-cluster.md`.
"""

import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from millstream.errors import ConfigError

_ZIPS = (".zip", ".egg")


def ship(spark: SparkSession, folder: Path, more: Sequence[str] = ()) -> None:
    """Give every executor what is loaded by now from `folder`, the app's own, and `more`: modules, packages, zips.

    Raises ConfigError if two of them would have the same name.
    """
    context = spark.sparkContext
    given = [Path(path).resolve() for path in more]
    packed = Path(str(context._temp_dir)) / "app.zip"  # goes with the session
    pack([*loaded_from(folder), *(path for path in given if path.suffix not in _ZIPS)], packed)
    for path in (packed, *(path for path in given if path.suffix in _ZIPS)):
        context.addPyFile(str(path))


def loaded_from(folder: Path) -> list[Path]:
    """The modules, and whole packages, of this process that `folder` on the import path has brought."""
    found = set()
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        place = folder.joinpath(*name.split("."))
        if origin is not None and Path(origin) in (place.with_suffix(".py"), place / "__init__.py"):
            top = folder / name.partition(".")[0]
            alone = top.with_suffix(".py")
            found.add(alone if Path(origin) == alone else top)
    return sorted(found)


def pack(sources: Iterable[Path], into: Path) -> None:
    """Write a zip of modules and packages that Python imports from. Raises ConfigError as above."""
    whence: dict[str, Path] = {}
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in sources:
            if whence.setdefault(source.name, source) != source:
                raise ConfigError(f"{whence[source.name]} and {source} would be the same module; rename one of them")
            for path in _contents(source):
                archive.write(path, path.relative_to(source.parent))


def _contents(source: Path) -> Iterator[Path]:
    yield source
    if source.is_dir():
        # Folders too: without its entry a package that has no __init__.py is not found in a zip.
        yield from (path for path in sorted(source.rglob("*")) if "__pycache__" not in path.parts)
