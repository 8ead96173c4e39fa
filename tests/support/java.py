"""Quick starts of Spark's Java for the run of tests, which starts it some thirty times.

Two things cost most of a start: compiling with the optimising compiler what runs for seconds only, and loading
some 15,000 classes from 300 archives. So tests run with the first compiler alone, and with the class archive of
`millstream class-archive`, which is written once an environment: 10.7 s of processor time a start become 3.0.

And they run with the home from which `millstream run` starts Spark, whatever starts it, so that Python need not compile
PySpark each time. With full counts, `test_cluster_faults` has a home with the archive of PySpark.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from millstream.spark.run.spark_home import archive_options, class_archive, quick_home, use_quick_home
from tests.support import spark_pythons

CACHE = Path(sys.prefix) / "cache"  # beside the PySpark that it is of, and not the user's
PRINTED = CACHE / "class-archive.json"
"""What the command printed."""
VARIABLE = "JAVA_TOOL_OPTIONS"
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"


def start_java_quickly() -> None:
    """Set the options of every Java that this process and its children start, and Spark's home.

    Java's temporary files are made where those of the run are: it does not read TMPDIR, and a killed one leaves them.
    And one thread for numpy in every Python, which otherwise starts one a core whenever it is imported.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = (
        os.environ.get(VARIABLE, ""),
        _QUICK,
        f"-Djava.io.tmpdir={tempfile.gettempdir()}",
        *archive_options(_use_home()),
    )
    os.environ[VARIABLE] = " ".join(options).strip()


def _use_home() -> Path:
    os.environ["XDG_CACHE_HOME"] = str(CACHE)
    os.environ["SPARK_HOME"] = str(quick_home())
    home = use_quick_home()
    assert home is not None
    site = home / "python" / "lib" / "pyspark.zip" / "sitecustomize.py"
    site.parent.mkdir(parents=True, exist_ok=True)
    if not site.exists() or site.read_text() != spark_pythons.SITE:
        written = site.with_suffix(f".{os.getpid()}")
        written.write_text(spark_pythons.SITE)
        written.rename(site)
    return home


def _write_archive() -> None:
    os.environ[VARIABLE] = _QUICK
    if class_archive(_use_home()) is None:
        command = [sys.executable, "-m", "millstream.cli.main", "class-archive", "--json"]
        PRINTED.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


if __name__ == "__main__":
    _write_archive()
