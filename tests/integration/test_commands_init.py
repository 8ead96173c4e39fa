"""`millstream init`: the project that it writes runs, its test passes, and no file is overwritten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commandline import call, reserved_port
from tests.support.pages import run_consoles
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.cli]

FILES = ["app.py", "test_app.py", "README.md", "millstream.toml"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "new" / "my shop"
    ended = call("init", str(folder))
    assert ended.out.splitlines() == [str(folder / name) for name in FILES]
    assert f"cd '{folder}' && millstream worker app.py:app\n" in ended.err
    return folder


def in_project(project: Path, *command: str) -> str:
    """What a command prints in the folder of the project, where it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project,
        env={**os.environ, "CI": "1"},
        capture_output=True,
        text=True,
        timeout=FAIL_SAFE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_test_of_the_project_passes(project: Path) -> None:
    assert "2 passed" in in_project(project, "pytest", "-q", "-p", "no:cacheprovider", "test_app.py")


def test_the_test_of_the_project_fails_if_its_handler_is_wrong(project: Path) -> None:
    app = (project / "app.py").read_text()
    (project / "app.py").write_text(app.replace("+ order.amount", "- order.amount"))
    with pytest.raises(AssertionError, match="1 failed, 1 passed"):
        in_project(project, "pytest", "-q", "-p", "no:cacheprovider", "test_app.py")


def test_the_code_of_the_project_is_as_linters_want_it(project: Path) -> None:
    in_project(project, "ruff", "check", "--isolated", "--select", "E,F,I,UP,B", "--line-length", "120", ".")
    in_project(project, "ruff", "format", "--isolated", "--check", "--line-length", "120", ".")


def test_the_commands_of_its_readme_print_what_it_shows(project: Path) -> None:
    with reserved_port() as port:
        run_consoles(str(project / "README.md"), project, port)


def test_its_settings_hold_for_commands_in_its_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = project / "millstream.toml"
    monkeypatch.chdir(project)
    with reserved_port() as port:  # bound, and nothing listens
        settings.write_text(settings.read_text().replace("6379", str(port)))
        refused = call("info")
    assert (refused.code, f"127.0.0.1:{port}" in refused.err) == (3, True)


@pytest.mark.parametrize("name", FILES)
def test_no_file_that_exists_is_overwritten_and_none_is_written_beside_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    refused = call("init", str(tmp_path))
    assert refused.code == 2
    assert (
        f"{tmp_path / name}: no file that exists is overwritten, and nothing was written; name a folder" in refused.err
    )
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_link_to_nowhere_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").symlink_to(tmp_path / "elsewhere")
    assert call("init", str(tmp_path)).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["millstream.toml"]


def test_other_files_may_be_there_and_the_current_folder_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert call("init", "--json").json() == {"folder": ".", "files": FILES}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES, "notes.txt"])


def test_a_file_in_place_of_the_folder_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = call("init", str(tmp_path / "file"))
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    what = f"{str(tmp_path / 'file')!r}: File exists; name a folder that you may write to, as in `millstream init shop`"
    assert what in refused.err
