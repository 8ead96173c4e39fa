"""Spark's home for a run on one machine: it has no archive of PySpark, and the user's own settings come first."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from millstream.spark.run import class_archive as archive_writer
from millstream.spark.run.spark_home import archive_name, class_archive, quick_home, use_quick_home
from tests.support.commandline import call

pytestmark = [pytest.mark.spark]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a user; SPARK_HOME is not set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    return tmp_path / "cache"


def test_the_home_has_the_programs_of_pyspark_and_no_archive_of_it(cache: Path) -> None:
    home = use_quick_home()
    assert home is not None
    assert home.is_relative_to(cache)
    assert os.environ["SPARK_HOME"] == str(home)
    assert (home / "bin" / "spark-submit").exists()
    assert list(home.glob("jars/spark-core_*.jar"))
    assert not (home / "python").exists()


def test_a_home_that_exists_is_used_again() -> None:
    assert use_quick_home() == use_quick_home() == quick_home()


def test_a_home_that_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert use_quick_home() is None
    assert os.environ["SPARK_HOME"] == "/opt/spark"


def test_without_a_cache_folder_spark_has_its_own_home(cache: Path) -> None:
    cache.write_text("a file, and no folder")
    assert use_quick_home() is None
    assert "SPARK_HOME" not in os.environ


@pytest.mark.parametrize("character", [":", '"', "\\"])
def test_a_cache_folder_that_java_cannot_use_leaves_spark_its_own_home(
    character: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"a{character}b"))
    assert use_quick_home() is None
    assert "SPARK_HOME" not in os.environ


def test_a_cache_folder_with_a_relative_path_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert quick_home().is_relative_to(tmp_path / ".cache")


def test_each_java_has_an_archive_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for version in ("17.0.15", "17.0.16"):
        (tmp_path / version / "bin").mkdir(parents=True)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / version))
        names.add(archive_name(1))
    (tmp_path / version / "release").write_text(f'JAVA_VERSION="{version}"')  # the same folder, after an update
    names.add(archive_name(1))
    assert len(names) == 3


def test_an_archive_that_is_cut_off_is_not_used(tmp_path: Path) -> None:
    (tmp_path / archive_name(4)).write_bytes(b"cut")
    assert class_archive(tmp_path) is None
    (tmp_path / archive_name(5)).write_bytes(b"whole")
    assert class_archive(tmp_path) == tmp_path / archive_name(5)


def test_an_archive_that_is_deleted_meanwhile_is_not_used(tmp_path: Path) -> None:
    (tmp_path / archive_name(4)).symlink_to(tmp_path / "deleted")
    assert class_archive(tmp_path) is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGINT, 130)])
def test_a_class_archive_command_that_is_stopped_ends_java_leaves_no_folder_and_says_so(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def launch(*_: Any, **__: Any) -> None:
        (folder,) = _folders()
        (folder / "classes.jsa").write_bytes(b"half")
        proc = subprocess.Popen(["sleep", "600"], process_group=0, stdout=subprocess.DEVNULL)
        started.append(proc)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(archive_writer, "open_session", launch)
    for name in ("has_java", "java_process"):  # another test may have started one in this process, which goes on
        monkeypatch.setattr(archive_writer, name, lambda: None)
    before = signal.getsignal(number)
    stopped = call("class-archive")
    assert (stopped.code, stopped.out) == (code, "")
    assert stopped.err.splitlines() == ["starting Spark", "it was stopped, and no class archive was written"]
    assert _folders() == []
    assert started[0].poll() == -signal.SIGKILL
    assert signal.getsignal(number) is before


def test_folders_of_killed_class_archive_commands_are_removed_unless_one_still_runs() -> None:
    home = use_quick_home()
    assert home is not None
    left = home / "class-archive-killed"
    (left / "checkpoint").mkdir(parents=True)
    with archive_writer._temporary_folder(home) as first:
        assert _folders() == [first]
        with archive_writer._temporary_folder(home) as second:
            assert sorted(_folders()) == sorted([first, second])
    assert _folders() == []


def _folders() -> list[Path]:
    return [one for one in quick_home().iterdir() if one.is_dir() and not one.is_symlink()]
