"""The class archive: a run maps it, Python imports no zip file, and an archive that does not fit harms nothing."""

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from millstream.spark.run.session import FIRST_COMPILER
from millstream.spark.run.spark_home import archive_name, archive_options, class_archive, quick_home
from tests.support.commandline import call
from tests.support.drivers import Driver
from tests.support.java import PRINTED
from tests.support.json_reference import faults, sections
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.drivers]

APP = """
from millstream import App, Message

app = App("app")

@app.handler("in", key="k")
def count(message: Message) -> None:
    pass
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An app, for runs without settings of Spark and Java."""
    monkeypatch.delenv("SPARK_HOME")
    options = [one for one in os.environ["JAVA_TOOL_OPTIONS"].split() if "SharedArchiveFile" not in one]
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", " ".join(options))
    (tmp_path / "counter.py").write_text(APP)
    return str(tmp_path / "counter.py")


def test_a_run_of_handlers_has_one_compiler_and_maps_the_class_archive_and_its_pythons_import_no_zip_file(
    app: str, millstream_url: str, tmp_path: Path
) -> None:
    archive = class_archive(quick_home())
    if archive is None:
        pytest.skip("make quick-java writes the class archive")
    with Driver(app, url=millstream_url, folder=tmp_path) as driver:
        driver.start()
        eventually(lambda: driver.has_emitted("started"), "the start", log=driver.errors)
        java = driver.java()
        assert FIRST_COMPILER in java.cmdline()
        assert str(archive) in {mapped.path for mapped in java.memory_maps()}
        pythons = [path for one in java.children(recursive=True) if (path := _import_path(one))]
        assert pythons
        parts = {part for path in pythons for part in path.split(os.pathsep)}
        assert not [part for part in parts if part.endswith(".zip") and Path(part).is_file()]
        assert driver.stop() == 0
        assert "Traceback" not in driver.errors()


def _import_path(process: psutil.Process) -> str:
    try:
        return process.environ().get("PYTHONPATH", "") if "python" in process.name() else ""
    except psutil.NoSuchProcess:
        return ""


def test_java_starts_without_an_archive_that_does_not_fit_and_says_nothing(tmp_path: Path) -> None:
    archive = class_archive(quick_home())
    contents = [b"no archive" * 10_000] + ([archive.read_bytes()] if archive is not None else [])
    for content in contents:
        (tmp_path / archive_name(len(content))).write_bytes(content)
        options = archive_options(tmp_path)
        assert options
        environment = {name: value for name, value in os.environ.items() if name != "JAVA_TOOL_OPTIONS"}
        java = subprocess.run(
            ["java", *options, "-cp", str(tmp_path), "-version"], check=False, env=environment, capture_output=True
        )
        assert java.returncode == 0
        assert java.stdout == b""
        assert b"version" in java.stderr
        (tmp_path / archive_name(len(content))).unlink()


def test_the_command_prints_what_it_has_written() -> None:
    if not PRINTED.exists():
        pytest.skip("make quick-java writes the class archive")
    printed = json.loads(PRINTED.read_text())
    assert faults(sections()["class-archive"], printed) == []
    assert Path(printed["path"]) == class_archive(quick_home())
    assert Path(printed["path"]).stat().st_size == printed["size_bytes"]


def test_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    outcome = call("class-archive")
    assert outcome.code == 2
    assert "SPARK_HOME" in outcome.err
    assert outcome.out == ""
