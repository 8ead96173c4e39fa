"""The program of the embedded server: which one is found, and which are passed over."""

import os
import re
from pathlib import Path

import pytest

from millstream.errors import ServerError
from millstream.redis_client import server_program as server_program_module
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.server_program import find_server_program
from tests.support.servers import install_package

pytestmark = [pytest.mark.cli]


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The Python package of a server is not installed."""
    install_package(tmp_path / "hidden", None)
    monkeypatch.syspath_prepend(tmp_path / "hidden")


@pytest.mark.usefixtures("no_package")
def test_the_error_of_a_missing_redis_server_names_both_ways_to_install_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match=r"no redis-server.*apt-get install redis-server.*pip install '\.\[server\]'"):
        EmbeddedServer().start()


def program(path: Path, text: str) -> Path:
    """An executable file."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def fake_server(folder: Path, answer: str, name: str = "redis-server") -> Path:
    """A program that only knows its version."""
    return program(folder / name, f"#!/bin/sh\necho '{answer}'\n")


def test_a_server_on_path_is_preferred_to_that_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_package(tmp_path / "site", Path(find_server_program().path))
    monkeypatch.syspath_prepend(tmp_path / "site")
    valkey = fake_server(tmp_path, "Valkey server v=8.1.0 sha=00000000:1", "valkey-server")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(find_server_program()) == f"Valkey 8.1.0 ({valkey})"
    redis_server = fake_server(tmp_path, "Redis server v=7.0.15 sha=00000000:0")
    assert str(find_server_program()) == f"Redis 7.0.15 ({redis_server})"


@pytest.mark.parametrize("on_path", ["", "Redis server v=6.0.16 sha=00000000:0"])
def test_the_server_of_the_package_runs_without_a_usable_one_on_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_path: str
) -> None:
    real = find_server_program()
    install_package(tmp_path / "site", Path(real.path))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PATH", str(tmp_path))
    if on_path:
        fake_server(tmp_path, on_path)
    with EmbeddedServer() as server:
        assert server.call("PING") == b"PONG"
        assert Path(server.program.path).is_relative_to(tmp_path / "site")
        assert server.program.version == real.version


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64", False),
        ("Redis server v=7.0.0 sha=00000000:0", True),
        ("Redis server v=10.2.0 sha=00000000:0", True),
        ("Valkey server v=7.2.5 sha=00000000:0", True),
        ("something else altogether", False),
    ],
)
def test_a_redis_server_older_than_7_0_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, accepted: bool
) -> None:
    binary = fake_server(tmp_path, answer)
    monkeypatch.setenv("PATH", str(tmp_path))
    if accepted:
        assert find_server_program().path == str(binary)
    else:
        with pytest.raises(ServerError, match=r"needs Redis 7\.0 or newer.*apt-get install redis-server"):
            find_server_program()


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "does not run (Exec format error)"),
        ("#!/none\n", "does not run (No such file or directory)"),
        ("#!/bin/sh\nexec sleep 600\n", "does not report its version within"),
    ],
)
def test_a_redis_server_that_does_not_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, words: str
) -> None:
    monkeypatch.setattr(server_program_module, "_ANSWER_S", 0.2)
    binary = program(tmp_path / "redis-server", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ServerError, match=re.escape(f"{binary} {words}")):
        find_server_program()
