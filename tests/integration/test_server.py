"""The embedded redis-server: its data, its death, its ports and folders, its errors."""

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

from millstream.errors import ConfigError, ServerError
from millstream.redis_client import embedded_server as server_module
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.server_program import find_server_program
from millstream.testing.topologies import tls_server
from tests.support.clocks import ManualClock
from tests.support.processes import lives
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli]

KILL_SAFE = {"appendfsync": "no"}


def is_dead(pid: int) -> bool:
    """Whether the process is gone; one that waits for an unhurried init to bury it counts."""
    return not lives(pid)


def is_silent(server: EmbeddedServer) -> bool:
    try:
        server.call("PING", timeout_ms=50)
    except ServerError:
        return True
    return False


def ended_in_order(folder: Path) -> bool:
    """Whether the server in this folder has ended by itself, as Redis and Valkey say after SIGTERM only."""
    return "is now ready to exit" in (folder / "redis.log").read_text()


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(extra=KILL_SAFE) as running:
        yield running


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, protocol=2) as connected:
        yield connected


@pytest.fixture
def no_lock_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a folder in use at once: no process of the test is about to leave it."""
    monkeypatch.setattr(server_module, "_LOCK_GRACE_MS", 0)


# --- what it promises about data ---


def test_the_server_runs_with_the_settings_of_the_design(client: redis.Redis) -> None:
    wanted = {
        "appendonly": "yes",
        "save": "",
        "bind": "127.0.0.1",
        "protected-mode": "yes",
        "maxmemory-policy": "noeviction",
        "stop-writes-on-bgsave-error": "no",
        "loglevel": "notice",
    }
    assert client.config_get(*wanted) == wanted


def test_the_append_only_file_is_synced_every_second_by_default() -> None:
    with EmbeddedServer() as server:
        assert server.call("CONFIG", "GET", "appendfsync") == [b"appendfsync", b"everysec"]


def test_data_and_port_survive_a_restart(server: EmbeddedServer, client: redis.Redis) -> None:
    first_pid, url = server.pid, server.url
    client.xadd("flights", {"tailnum": "N14228"})

    server.restart()

    assert server.pid != first_pid
    assert server.url == url
    assert client.xlen("flights") == 1


def test_a_kill_9_loses_nothing_that_was_answered(server: EmbeddedServer, client: redis.Redis) -> None:
    for round_number in range(3):
        for entry in range(500):
            client.xadd("flights", {"entry": entry})
        server.kill()
        assert not server.running
        server.start()
        assert client.xlen("flights") == 500 * (round_number + 1)


@pytest.mark.parametrize("cut_at", [b"marker", b"*1\r\n$4\r\nEXEC", b"EXEC"], ids=["value", "command", "last command"])
def test_a_transaction_during_which_the_server_was_killed_never_takes_effect(cut_at: bytes) -> None:
    with EmbeddedServer(extra=KILL_SAFE) as server, Client(server.url) as client:
        client.execute("SET", "before", "1")
        client.execute("EVAL", "redis.call('RPUSH', KEYS[1], 'a') redis.call('SET', 'marker', 'x')", 1, "list")
        folder = Path(client.execute("CONFIG", "GET", "dir")[1].decode())
        server.kill()
        (written,) = folder.glob("*/*.incr.aof")
        whole = written.read_bytes()
        written.write_bytes(whole[: whole.rindex(cut_at) + (0 if cut_at.startswith(b"*") else 2)])
        server.start()
        for count in range(1, 3):  # what Redis keeps of the transaction takes effect at the second start
            client.retry_while_unavailable(lambda: client.execute("PING"), what="test")
            assert client.execute("LLEN", "list") == count - 1
            client.execute("EVAL", "redis.call('RPUSH', KEYS[1], 'b') redis.call('SET', 'other', 'x')", 1, "list")
            server.kill()
            server.start()
        client.retry_while_unavailable(lambda: client.execute("PING"), what="test")
        assert client.execute("LRANGE", "list", 0, -1) == [b"b", b"b"]
        assert (client.execute("GET", "before"), client.execute("GET", "marker")) == (b"1", None)


def test_a_damaged_append_only_file_is_an_error_and_stays_as_it_is() -> None:
    with EmbeddedServer(extra=KILL_SAFE) as server, Client(server.url) as client:
        client.execute("EVAL", "redis.call('SET', 'a', 'x') redis.call('SET', 'marker', 'x')", 0)
        folder = Path(client.execute("CONFIG", "GET", "dir")[1].decode())
        server.kill()
        (written,) = folder.glob("*/*.incr.aof")
        damaged = written.read_bytes().replace(b"marker", b"mark")
        written.write_bytes(damaged)
        with pytest.raises(ServerError, match="Bad file format"):
            server.start()
        if written.exists():  # a temporary folder is removed
            assert written.read_bytes() == damaged


def test_a_restart_keeps_the_rewritten_configuration(server: EmbeddedServer, client: redis.Redis) -> None:
    client.config_set("stream-node-max-entries", 77)
    client.config_rewrite()
    server.restart()
    assert client.config_get("stream-node-max-entries") == {"stream-node-max-entries": "77"}


def test_a_given_folder_is_kept_and_used_by_the_next_server(tmp_path: Path) -> None:
    folder = tmp_path / "with a space" / "data"
    with EmbeddedServer(data_dir=folder) as first:
        first.call("SET", "key", "value")
    with EmbeddedServer(data_dir=folder) as second:
        assert second.data_dir == folder
        assert second.call("GET", "key") == b"value"


def test_no_other_user_of_the_machine_can_read_the_data(tmp_path: Path) -> None:
    with EmbeddedServer(data_dir=tmp_path / "made" / "data") as server:
        server.call("SET", "key", "value")
        folder = server.data_dir
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        files = [path for path in folder.rglob("*") if path.name not in ("redis.log", "millstream.lock")]
        assert {"redis.conf", "appendonlydir"} <= {path.name for path in files}
        assert any(path.suffix == ".aof" for path in files)
        for path in files:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_an_existing_folder_keeps_its_permissions(tmp_path: Path) -> None:
    before = tmp_path.stat().st_mode
    with EmbeddedServer(data_dir=tmp_path):
        assert tmp_path.stat().st_mode == before


def test_a_temporary_folder_is_removed_with_its_server() -> None:
    with EmbeddedServer() as server:
        folder = server.data_dir
        assert (folder / "redis.log").exists()
    assert not folder.exists()


def test_a_server_listens_on_a_unix_socket_instead_of_a_port() -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())  # `tmp_path` is too long for a socket
        path = Path(folder) / 'a "quoted" path' / "redis.sock"
        path.parent.mkdir()
        server = stack.enter_context(EmbeddedServer(unix_socket=path))
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        assert server.call("CONFIG", "GET", "port") == [b"port", b"0"]
        with pytest.raises(ServerError, match="another server listens on"):
            EmbeddedServer(unix_socket=path).start()
        assert server.call("PING") == b"PONG"


# --- pause, stop ---


def test_a_paused_server_is_silent_until_it_is_resumed(server: EmbeddedServer) -> None:
    server.pause()
    assert server.running
    with pytest.raises(ServerError, match="does not answer 'PING'"):
        server.call("PING", timeout_ms=200)
    server.resume()
    assert server.call("PING") == b"PONG"


def test_a_paused_server_stops_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_STOP_MS", 1_000 * FAIL_SAFE_S)  # it may get no processor for long
    server = EmbeddedServer(data_dir=tmp_path)
    server.start()
    pid = server.pid
    server.pause()
    server.stop()
    assert is_dead(pid)
    assert ended_in_order(tmp_path), "it was not left to be killed"


def test_a_server_that_does_not_stop_in_order_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_STOP_MS", 200)
    server = EmbeddedServer(extra={"lua-time-limit": "0"})
    server.start()
    pid = server.pid
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b'EVAL "while true do end" 0\r\n')
        eventually(lambda: is_silent(server), "the script to run")
        server.stop()
    assert is_dead(pid)


def test_a_server_that_dies_while_it_is_stopped_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedServer()
    server.start()
    process = server._process
    assert process is not None
    look = process.poll

    def look_and_die() -> int | None:
        monkeypatch.setattr(process, "poll", look)
        code = look()
        process.kill()
        process.wait()
        return code

    monkeypatch.setattr(process, "poll", look_and_die)
    server.stop()
    assert not server.running


def test_stopping_a_server_twice_is_harmless_and_using_a_stopped_server_is_an_error(server: EmbeddedServer) -> None:
    with pytest.raises(ServerError, match="is already running"):
        server.start()
    server.stop()
    server.stop()
    server.kill()
    for use in (lambda: server.pid, lambda: server.data_dir, server.pause, server.resume):
        with pytest.raises(ServerError, match=r"start\(\) it first"):
            use()


# --- it dies with its parent ---

PARENT = """
import os, sys, time
from pathlib import Path
from tempfile import TemporaryDirectory
from millstream.redis_client.embedded_server import EmbeddedServer
server = EmbeddedServer(data_dir=Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
{then}
"""


StartParent = Callable[..., tuple[subprocess.Popen[str], int]]


@pytest.fixture
def start_parent() -> Iterator[StartParent]:
    """Starts a Python process with an embedded server in a folder; returns it and the pid of its server."""
    with ExitStack() as stack:

        def start(folder: Path, then: str) -> tuple[subprocess.Popen[str], int]:
            command = [sys.executable, "-c", PARENT.format(then=then), str(folder)]
            parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(parent)
            stack.callback(parent.kill)
            return parent, int(read_line(parent))

        yield start


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("state", ["running", "paused"])
def test_a_server_dies_with_a_killed_parent_and_frees_its_folder(
    tmp_path: Path, start_parent: StartParent, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(server_module, "_LOCK_GRACE_MS", 1_000 * FAIL_SAFE_S)  # a dying process may get no processor
    pause = "server.pause()\n" if state == "paused" else ""
    parent, pid = start_parent(tmp_path, then=f"{pause}print('ready', flush=True)\ntime.sleep(600)")
    assert read_line(parent) == "ready"
    assert not is_dead(pid)
    parent.kill()

    with EmbeddedServer(data_dir=tmp_path) as successor:
        eventually(lambda: is_dead(pid), "the end of what has freed the folder")
        assert successor.call("PING") == b"PONG"


def test_a_server_that_was_never_stopped_exits_in_order_with_its_parent(
    tmp_path: Path, start_parent: StartParent
) -> None:
    patient = "from millstream.redis_client import embedded_server; embedded_server._STOP_MS = 600_000"
    parent, pid = start_parent(tmp_path, then=patient)
    assert parent.wait(FAIL_SAFE_S) == 0
    eventually(lambda: is_dead(pid), "the server to end")
    assert ended_in_order(tmp_path), "the exit was not left to the parent-death signal"


def test_a_server_survives_the_thread_that_started_it() -> None:
    server = EmbeddedServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join(FAIL_SAFE_S)
    try:
        # The kernel sends the signal before it forgets the thread, and no process survives this signal.
        eventually(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists(), "the end of the thread")
        assert server.call("PING") == b"PONG"
    finally:
        server.stop()


# The child goes through all that its copy of the parent's server offers, and lives on with that copy.
FORK = """
parent = os.getpid()
child = os.fork()
if child == 0:
    server.stop()
    with EmbeddedServer() as its_own:
        print(its_own.call("PING"), flush=True)
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(0)
sys.stdin.readline()
print(server.call("PING"), flush=True)
server.stop()
server.start()
print(server.call("PING"), flush=True)
os.kill(child, 9)
"""


@pytest.mark.usefixtures("no_lock_grace")
def test_a_fork_of_the_parent_neither_stops_the_server_nor_keeps_its_folder_in_use(
    tmp_path: Path, start_parent: StartParent
) -> None:
    parent, _ = start_parent(tmp_path, then=FORK)
    assert parent.stdin is not None
    assert read_line(parent) == "b'PONG'"
    with pytest.raises(ServerError, match="in use"):
        EmbeddedServer(data_dir=tmp_path).start()
    parent.stdin.write("the child is done\n")
    parent.stdin.flush()
    assert [read_line(parent), read_line(parent)] == ["b'PONG'", "b'PONG'"]
    assert parent.wait(FAIL_SAFE_S) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux")
def test_a_child_whose_parent_died_before_the_death_signal_was_set_never_becomes_a_server() -> None:
    not_its_parent = str(os.getppid())
    command = [
        sys.executable,
        "-c",
        server_module._LAUNCHER,
        not_its_parent,
        "/bin/echo",
        "I became a server",
    ]
    launched = subprocess.run(command, capture_output=True, text=True, check=False)
    assert launched.returncode == 1
    assert launched.stdout == ""
    assert "the parent process has ended" in launched.stderr


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(server: EmbeddedServer) -> None:
    assert os.getpgid(server.pid) != os.getpgid(0)


# --- ports ---


@pytest.fixture
def used_port() -> Iterator[int]:
    """A port where another server answers PING."""
    with EmbeddedServer() as other:
        yield other.port


def test_a_picked_port_that_another_process_uses_is_replaced(monkeypatch: pytest.MonkeyPatch, used_port: int) -> None:
    pick, lost = server_module._pick_port, iter([used_port, used_port])
    monkeypatch.setattr(server_module, "_pick_port", lambda: next(lost, None) or pick())
    with EmbeddedServer() as server:
        assert next(lost, None) is None
        assert server.port != used_port
        assert server.call("CONFIG", "GET", "dir") == [b"dir", str(server.data_dir).encode()]


def test_a_fixed_port_that_is_in_use_is_a_clear_error(used_port: int, tmp_path: Path) -> None:
    server = EmbeddedServer(port=used_port, data_dir=tmp_path)
    with pytest.raises(ServerError, match=f"port {used_port} is in use: stop the server"):
        server.start()
    assert not server.running
    with EmbeddedServer(data_dir=tmp_path) as next_one:
        assert next_one.port != used_port


def test_many_servers_started_at_once_get_ports_of_their_own() -> None:
    servers = [EmbeddedServer() for _ in range(8)]
    threads = [threading.Thread(target=server.start) for server in servers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(FAIL_SAFE_S)
        assert len({server.call("CONFIG", "GET", "port")[1] for server in servers}) == len(servers)
    finally:
        for server in servers:
            server.stop()


# --- folders ---


@pytest.mark.usefixtures("no_lock_grace")
def test_a_second_server_in_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with EmbeddedServer(data_dir=tmp_path) as first:
        with pytest.raises(ServerError, match=rf"in use .*started by process {os.getpid()}:"):
            EmbeddedServer(data_dir=tmp_path).start()
        first.call("SET", "key", "value")
        assert first.call("GET", "key") == b"value"


@pytest.mark.usefixtures("no_lock_grace")
def test_a_folder_in_use_by_another_process_is_refused(tmp_path: Path, start_parent: StartParent) -> None:
    parent, _ = start_parent(tmp_path, then="time.sleep(600)")
    with pytest.raises(ServerError, match=rf"in use .*started by process {parent.pid}:"):
        EmbeddedServer(data_dir=tmp_path).start()


@pytest.mark.usefixtures("no_lock_grace")
def test_a_killed_server_keeps_its_folder_until_it_is_stopped(tmp_path: Path) -> None:
    with EmbeddedServer(data_dir=tmp_path) as first:
        first.kill()
        with pytest.raises(ServerError, match="in use"):
            EmbeddedServer(data_dir=tmp_path).start()


def test_an_unusable_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError, match=r"cannot use the data folder .*/file"):
        EmbeddedServer(data_dir=tmp_path / "file").start()


# --- what can be wrong with redis-server and its configuration ---


def test_the_check_of_an_append_only_file_takes_no_longer_than_the_start_may(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with EmbeddedServer(data_dir=tmp_path / "data") as server:
        server.call("SET", "a", "1")
    binary = tmp_path / "redis-server"
    binary.write_text(
        f'#!/bin/sh\ncase $1 in *.manifest) exec sleep 600;; esac\nexec {find_server_program().path} "$@"\n'
    )
    binary.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(ServerError, match=r"append-only file .* was not checked in time"):
            EmbeddedServer(data_dir=tmp_path / "data").start(timeout_ms=500)
    with EmbeddedServer(data_dir=tmp_path / "data") as server:
        assert server.call("GET", "a") == b"1"


def test_the_error_of_a_refused_directive_quotes_redis() -> None:
    server = EmbeddedServer(extra={"maxmemory-polizy": "noeviction"})
    with pytest.raises(
        ServerError,
        match=r"(?s)exited with code 1.*(maxmemory-polizy.*Bad directive|Unresolved Configuration.*maxmemory-polizy)",
    ):
        server.start()
    assert not server.running


def test_a_server_that_was_built_without_tls_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    # The words of Redis 8.2 and of Valkey 8 and 9.
    binary.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo v=8.2.3 && exit\necho '# Failed finding TLS support.'\nexit 1\n"
    )
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ServerError, match="built without TLS"), tls_server():
        pass


def test_a_server_that_is_not_ready_in_time_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\n[ $1 = --version ] && echo v=7.0.15 && exit\necho dawdling $$\nexec sleep 60\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    class Clock(ManualClock):
        """It stands still until the server has begun."""

        def sleep_ms(self, duration_ms: float) -> None:
            eventually((tmp_path / "redis.log").read_text, "the first line of the log")
            super().sleep_ms(duration_ms)

    monkeypatch.setattr(server_module, "SYSTEM_CLOCK", Clock())
    with pytest.raises(ServerError, match=r"(?s)not ready in time.*dawdling \d+") as failure:
        EmbeddedServer(data_dir=tmp_path).start(timeout_ms=500)
    assert is_dead(int(str(failure.value).split()[-1]))


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"port": 6390, "unix_socket": Path("redis.sock")}, "either a port or a unix socket"),
        ({"unix_socket": Path("x" * 120)}, "too long for a unix socket"),
        ({"extra": {"Port": "6390"}}, "sets `Port` itself"),
        ({"extra": {"save": '""\nbind 0.0.0.0'}}, "must be a single line"),
    ],
)
def test_invalid_parameters_are_refused_at_once(parameters: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EmbeddedServer(**parameters)  # type: ignore[arg-type]


def test_the_error_of_a_refused_command_quotes_redis(server: EmbeddedServer) -> None:
    with pytest.raises(ServerError, match="refused 'NONSENSE': ERR unknown command"):
        server.call("NONSENSE")
