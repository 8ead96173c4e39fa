"""Spark's home for a run on one machine, from which Java and Python start more quickly than from PySpark's own.

Spark gives every Python that it starts the import path `python/lib/pyspark.zip` of its home (PythonUtils,
sparkPythonPath), and Python compiles what it imports from a zip file each time: 1.2 s of a core, and 0.2 s without. A
query needs five of these processes, one after another. So its home is a folder with links to PySpark's programs and Java
archives, and without that file: Python then imports the same PySpark from where it is installed, compiled.

The folder also has the class archive (JEP 350, "Dynamic CDS Archives") that `class_archive.py` writes. Java maps the
classes in it, in place of reading some 10,000 of them from 300 files.
"""

import logging
import os
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

logger = logging.getLogger(__name__)

WRITE_ARCHIVE = "-XX:ArchiveClassesAtExit="
"""The option of Java that names the class archive to write, in place of one to use."""

_LINKED = ("bin", "jars", "conf")
_ZIP = "python/lib/pyspark.zip"
_UNUSABLE = {os.pathsep, '"', "\\"}
_NO_HOME = (OSError, RuntimeError, PackageNotFoundError)
"""What is raised where there can be no quick home: RuntimeError if the user has no home, the last one for a PySpark of a distribution."""


def use_quick_home() -> Path | None:
    """Let the next Java process of Spark have the quick home; return it.

    None, with nothing changed, if the user has set SPARK_HOME, or if the cache folder of the user cannot be written:
    that is $XDG_CACHE_HOME or ~/.cache (XDG Base Directory Specification).
    """
    installed = _installed()
    if not (installed / _ZIP).exists():
        return None
    try:
        home = quick_home()
        if os.environ.get("SPARK_HOME", str(installed)) not in (str(installed), str(home)):
            return None
        if _UNUSABLE.intersection(str(home)):
            raise OSError(f"{home} has a character that Spark's scripts or Java do not allow there")
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in _LINKED:
            with suppress(FileExistsError):
                (home / part).symlink_to(installed / part)
    except _NO_HOME as error:
        logger.info(
            "there is no folder for a quick start of Spark: %s; its Python processes start a second later each", error
        )
        return None
    os.environ["SPARK_HOME"] = str(home)
    return home


def quick_home() -> Path:
    """The quick home of this PySpark and this user, which may not exist yet. Raises one of `_NO_HOME`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = cache if cache.is_absolute() else Path.home() / ".cache"
    return folder / "millstream" / f"spark-{version('pyspark')}-{crc32(str(_installed()).encode()):08x}"


def class_archive(home: Path) -> Path | None:
    """The class archive for the Java that Spark starts; None if there is none.

    An archive that is not as long as its name says is none: Java would be killed when it reads beyond its end.
    """
    for archive in home.glob(archive_name("*")):
        with suppress(FileNotFoundError):  # it may be deleted at any time
            if archive.stem.endswith(f"-{archive.stat().st_size}"):
                return archive
    return None


def has_class_archive() -> bool:
    """Whether the next run on this machine has a class archive."""
    with suppress(*_NO_HOME):
        return class_archive(quick_home()) is not None
    return False


def archive_name(size_bytes: int | str) -> str:
    """The file name of a class archive of that size, for the Java that Spark starts: only that one can use it."""
    java_home = os.environ.get("JAVA_HOME")
    java = (Path(java_home, "bin", "java") if java_home else Path(shutil.which("java") or "java")).resolve()
    release = b""
    with suppress(OSError):
        release = (java.parent.parent / "release").read_bytes()  # of a Java runtime: its version and vendor
    return f"classes-{crc32(str(java).encode() + release):08x}-{size_bytes}.jsa"


def archive_options(home: Path) -> list[str]:
    """The options that let Java use the class archive; none if there is none. Java starts without one that does not fit."""
    archive = class_archive(home)
    # Java would say on stdout that an archive does not fit.
    quiet = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")
    return [f"-XX:SharedArchiveFile={archive}", *quiet] if archive is not None else []


def _installed() -> Path:
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
