"""Quick starts of Spark's Java for the run of tests, which starts it some thirty times.

Two things cost most of a start: compiling with the optimising compiler what runs for seconds only, and loading
some 15,000 classes from 300 archives. So tests run with the first compiler alone, and with a class-data archive
(JEP 350), which is made once an environment by a training run: 10.7 s of processor time a start become 3.0.

Each query starts some Python, too, and Spark has it import PySpark from the archive `python/lib/pyspark.zip` in its home,
which Python has to compile anew each time. So tests run with a home without that archive, where the same PySpark is
imported as it is installed: 1.7 s of processor time a query become 1.2. With full counts, `test_cluster_faults` has a home with it.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support import spark_pythons

HOME = Path(sys.prefix) / "spark-home"  # beside the PySpark that it is of
ARCHIVE = HOME / "classes.jsa"
VARIABLE = "JAVA_TOOL_OPTIONS"
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData -Xlog:cds=off -Xlog:cds+dynamic=off"


def start_java_quickly() -> None:
    """Set the options of every Java that this process and its children start, and Spark's home.

    Java's temporary files are made where those of the run are: it does not read TMPDIR, and a killed one leaves them.
    And one thread for numpy in every Python, which otherwise starts one a core whenever it is imported.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["SPARK_HOME"] = str(_home())
    options = f"{_QUICK} -Djava.io.tmpdir={tempfile.gettempdir()}"
    if ARCHIVE.exists():
        options += f" -XX:SharedArchiveFile={ARCHIVE}"
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '')} {options}".strip()


def _home() -> Path:
    HOME.mkdir(parents=True, exist_ok=True)
    installed = find_spec("pyspark")
    assert installed is not None
    assert installed.origin is not None
    for part in ("bin", "jars"):
        with suppress(FileExistsError):
            (HOME / part).symlink_to(Path(installed.origin).parent / part)
    site = HOME / "python" / "lib" / "pyspark.zip" / "sitecustomize.py"
    site.parent.mkdir(parents=True, exist_ok=True)
    if not site.exists() or site.read_text() != spark_pythons.SITE:
        written = site.with_suffix(f".{os.getpid()}")
        written.write_text(spark_pythons.SITE)
        written.rename(site)
    return HOME


def _train(archive: str) -> None:
    """One batch of a handler and one of the source, on an embedded server, load what tests load."""
    from pyspark import SparkContext

    from millstream import App, Message
    from millstream.redis_client.client import Client
    from millstream.redis_client.embedded_server import EmbeddedServer
    from millstream.spark.run.session import close_session, open_session
    from millstream.spark.run.supervisor import RunSettings, Supervisor

    app = App("training")

    @app.handler("in", key="k", into="out")
    def work(message: Message) -> dict[str, bytes]:
        return {"k": message.fields["k"]}

    dump = {"spark.driver.extraJavaOptions": f"-XX:ArchiveClassesAtExit={archive}"}
    session = open_session("training", master="local[2,4]", conf={"spark.sql.shuffle.partitions": "2", **dump})
    with EmbeddedServer() as server, Client(server.url) as client:
        client.pipeline([("XADD", "in", "*", "k", n % 3, "n", n) for n in range(10)])
        settings = RunSettings(url=server.url, checkpoint=str(server.data_dir / "checkpoint"), once=True)
        Supervisor(app, session, settings, on_event=lambda _: None).run()
        assert client.execute("XLEN", "out") == 10
        rows = session.read.format("redis-streams").option("url", server.url).option("subscribe", "out").load()
        assert rows.groupBy("stream").count().collect()[0][1] == 10
    close_session(session)
    end_java(SparkContext._gateway)


def end_java(gateway: Any) -> None:
    """End the Java process behind a gateway, which otherwise lives as long as this one, and wait until it has."""
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


def _make_archive() -> None:
    started = ARCHIVE.with_suffix(f".{os.getpid()}")
    environment = {**os.environ, VARIABLE: _QUICK, "SPARK_HOME": str(_home())}
    command = [sys.executable, "-m", "tests.support.java", str(started)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    started.rename(ARCHIVE)


if __name__ == "__main__":
    if sys.argv[1:]:
        _train(sys.argv[1])
    elif not ARCHIVE.exists():
        _make_archive()
