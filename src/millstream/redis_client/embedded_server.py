"""A real `redis-server` as a child process, for `millstream dev`, the demo and the tests.

The server must die with the process that started it, even when that is killed with `kill -9` and can clean
up nothing. On Linux the kernel does it: a few lines of Python set the child's parent-death signal
(`prctl(2)`, PR_SET_PDEATHSIG) and then become redis-server by `exec`, so nothing has to stay alive to watch.
Two traps of that call are closed here. The signal fires when the *thread* that forked the child ends, so one
thread which lives as long as the process forks them all. And a parent that died before the call would never
be noticed, so the child then looks whether it still has that parent. The signal is SIGKILL, since a paused
server takes no other. Elsewhere than on Linux, only an orderly exit of Python stops the server.
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

OLDEST_VERSION = (7, 0)

_STOP_MS = 5_000
_STOP_AGAIN_MS = 100
_LOCK_GRACE_MS = 2_000
_POLL_MS = 10
_LOG_TAIL_LINES = 12
_UNIX_PATH_BYTES = 107

# Below the range from which the kernel takes the ports of outgoing connections: no client can sit on the port
# while its server restarts, nor connect to itself there. A cluster node also listens on its port + 10,000.
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
    sys.exit("the parent is gone")
os.execv(command[0], command)
"""


def find_redis_server() -> str:
    """Path of the `redis-server` (or `valkey-server`) on PATH, once its version is known to be new enough.

    Raises `ServerError`, saying what to install, if there is none or it is older than Redis 7.0.
    """
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise ServerError("redis-server is not on PATH: install it with `apt-get install redis-server`")
    _check_version(binary, Path(binary).stat().st_mtime_ns)
    return binary


@functools.cache
def _check_version(binary: str, changed_ns: int) -> None:  # noqa: ARG001 - another binary at the same path is asked again
    """Raise ServerError if the binary is too old; asked once of each that is there."""
    answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    version = re.search(r"v=(\d+)\.(\d+)", answer.stdout)
    if version is None or (int(version[1]), int(version[2])) < OLDEST_VERSION:
        found = version[0] if version else "of an unknown version"
        raise ServerError(
            f"{binary} is {found}, but millstream needs Redis 7.0 or newer: "
            "`apt-get install redis-server` brings it on Debian 12 and Ubuntu 24.04 or later"
        )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What an `EmbeddedServer` is asked for; its parameters explain the fields."""

    data_dir: Path | None
    port: int
    unix_socket: Path | None
    extra: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.port and self.unix_socket:
            raise ConfigError("an embedded server has either a port or a unix socket: leave one of them out")
        if self.unix_socket and len(os.fsencode(self.unix_socket)) > _UNIX_PATH_BYTES:
            raise ConfigError(f"{self.unix_socket} is too long for a unix socket: choose a shorter path")
        for name, value in self.extra.items():
            if name.lower() in _OWN_DIRECTIVES:
                raise ConfigError(f"the embedded server sets `{name}` itself: leave it out of `extra`")
            if "\n" in name + value:
                raise ConfigError(f"the redis.conf directive {name!r} must be a single line")

    @property
    def tls(self) -> bool:
        """Whether the port speaks TLS only."""
        return "tls-cert-file" in self.extra

    @property
    def sentinel(self) -> bool:
        """Whether this is a Sentinel, not a database."""
        return any(name.startswith("sentinel ") for name in self.extra)

    def redis_conf(self, port: int) -> str:
        """Text of redis.conf. Its folder and its log file are those the process is started in."""
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

    Promises: its data and its port outlive `restart` and `kill`; one folder serves one server at a time. But
    under `appendfsync everysec`, which it sets, SIGKILL costs what Redis answered while it was syncing the
    file in the background (at most 2 s, usually nothing). With `extra={"appendfsync": "no"}` or `"always"`
    each write reaches the kernel before its reply, so that SIGKILL costs nothing; a power cut costs nothing
    with `always` only. Not thread-safe.

    Parameters, all by keyword:
      data_dir: folder for the data, the log and redis.conf, created if need be and kept. None: a temporary
        folder, removed at `stop`.
      port: TCP port; 0 picks a free one at the first start.
      unix_socket: path of a unix socket to listen on, in place of TCP.
      extra: more redis.conf directives, written as there. `tls-cert-file` makes the port speak TLS only;
        directives that begin with `sentinel` make the server a Sentinel. Directives of the same name are told
        apart by putting more into the name: `{"user alice": "on >secret ~* +@all"}`.

    Raises `ConfigError` for parameters that cannot work together.
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
        self._folder: _ClaimedFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = os.getpid()

    # --- where it is ---

    @property
    def running(self) -> bool:
        """Whether the process lives; a paused one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id. Raises `ServerError` if it does not run."""
        return self._living().pid

    @property
    def port(self) -> int:
        """TCP port, known once started. Raises `ServerError` before, and for a server on a unix socket."""
        if self._port == 0:
            raise ServerError("this server has no port: it listens on a unix socket, or was never started")
        return self._port

    @property
    def data_dir(self) -> Path:
        """Folder with its data, log and redis.conf. Raises `ServerError` unless started."""
        return self._claimed().path

    @property
    def url(self) -> str:
        """Connection URL, known once started: `redis://`, `rediss://` or `unix://`, without credentials."""
        if self._config.unix_socket:
            return f"unix://{quote(str(self._config.unix_socket))}"
        return f"{'rediss' if self._config.tls else 'redis'}://127.0.0.1:{self.port}/0"

    # --- its life ---

    def start(self, *, timeout_ms: float = 30_000) -> None:
        """Start it, and return when it answers; loading a large append-only file counts.

        Raises `ServerError`, with the end of its log and what to do, if it runs already, there is no usable
        redis-server, its folder or port is taken, it ends, or it does not answer within `timeout_ms`. A failed
        start leaves it stopped, which removes a temporary folder.
        """
        if self.running:
            raise ServerError(f"this server runs already (pid {self.pid}): use restart()")
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_ms
        binary = find_redis_server()
        try:
            if self._folder is None:
                self._owner_pid = os.getpid()
                self._folder = _ClaimedFolder(self._config.data_dir)
                atexit.register(self.stop)
                self._first_launch(binary, deadline_ms)
            else:
                self._launch(binary, deadline_ms)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it in order (SIGTERM, then SIGKILL after 5 s), free its folder, and remove a temporary one.

        Does nothing when it is stopped already, and in a fork of the process that started it.
        """
        if self._folder is None or os.getpid() != self._owner_pid:
            return
        self._terminate()
        self._folder.release()
        self._folder = None
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """End it with SIGKILL, together with a rewrite of its append-only file. `start` brings it back."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def restart(self, *, timeout_ms: float = 30_000) -> None:
        """End it in order if it runs, and start it again: same port, same data, same redis.conf.

        What the server itself wrote into redis.conf (Sentinel, CONFIG REWRITE) is kept. Raises as `start`.
        """
        self._terminate()
        self.start(timeout_ms=timeout_ms)

    def pause(self) -> None:
        """Freeze it (SIGSTOP); returns when it stands still. Raises `ServerError` if it does not run."""
        process = self._living()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT). Raises `ServerError` if it does not run."""
        self._living().send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- a word with it ---

    def call(self, *command: str | bytes | int, timeout_ms: float = 10_000) -> Any:
        """Send one command over a connection of its own; the reply as hiredis parses it (bytes, int, list).

        For probes and set-up, without credentials and without TLS: this is not a client. Raises `ServerError`
        if the server refuses the command, or is silent for `timeout_ms`.
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

    # --- starting and ending the process ---

    def _first_launch(self, binary: str, deadline_ms: float) -> None:
        if (unix_socket := self._config.unix_socket) and _is_listening(unix_socket):
            raise ServerError(f"another server listens on {unix_socket}: stop it or choose another path")
        picks_port = self._port == 0 and not self._config.unix_socket
        for attempts_left in reversed(range(_PORT_ATTEMPTS if picks_port else 1)):
            if picks_port:
                self._port = _pick_port()
            self._claimed().conf.touch(mode=0o600)  # it may hold a password
            self._claimed().conf.write_text(self._config.redis_conf(self._port))
            try:
                self._launch(binary, deadline_ms)
            except _PortTaken:
                if not attempts_left:
                    raise
            else:
                return

    def _launch(self, binary: str, deadline_ms: float) -> None:
        folder = self._claimed()
        log_start = folder.log.stat().st_size if folder.log.exists() else 0
        mode = ["--sentinel"] if self._config.sentinel else []
        self._process = _spawn([binary, folder.conf.name, *mode], folder)
        while True:
            # First the exit, then the log: what it wrote before it ended is then sure to be seen.
            code = self._process.poll()
            log = folder.log.read_bytes()[log_start:].decode(errors="replace")
            if code is not None:
                raise _start_failure(f"ended with code {code}", log, self._port)
            left_ms = deadline_ms - SYSTEM_CLOCK.monotonic_ms()
            if left_ms <= 0:
                raise _start_failure("was not ready in time", log, self._port)
            # The log comes before the PING, which whoever else sits on the port would answer just as well.
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
        if not self.running:
            return
        process = self._living()
        give_up_ms = SYSTEM_CLOCK.monotonic_ms() + _STOP_MS
        while SYSTEM_CLOCK.monotonic_ms() < give_up_ms:
            # Again, as it may refuse: a replica does while it writes its first append-only file.
            process.terminate()
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(_STOP_AGAIN_MS / 1000)
            except subprocess.TimeoutExpired:
                continue
            return
        self.kill()

    def _living(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise ServerError("this server does not run: start() it first")
        return self._process

    def _claimed(self) -> "_ClaimedFolder":
        if self._folder is None:
            raise ServerError("this server was not started, or is stopped: start() it first")
        return self._folder


class _PortTaken(ServerError):
    """Another process listens on the port."""


class _ClaimedFolder:
    """A data folder, held under a lock until `release`.

    The lock belongs to the open file, which the server inherits: it also holds while a server outlives the
    process that started it by a moment, and between two servers of one process.
    """

    def __init__(self, data_dir: Path | None) -> None:
        self._temporary = data_dir is None
        self.path = data_dir or Path(tempfile.mkdtemp(prefix="millstream-"))
        self.conf = self.path / "redis.conf"
        self.log = self.path / "redis.log"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # all messages and states are in it
            self.lock = (self.path / "millstream.lock").open("a+")
        except OSError as error:
            raise ServerError(f"cannot use the data folder {self.path}: {error.strerror}") from error
        try:
            self._take_lock()
        except BaseException:
            self.lock.close()
            raise

    def _take_lock(self) -> None:
        give_up_ms = SYSTEM_CLOCK.monotonic_ms() + _LOCK_GRACE_MS
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # A server whose parent was just killed holds it for some milliseconds more.
                if SYSTEM_CLOCK.monotonic_ms() >= give_up_ms:
                    raise ServerError(self._refusal()) from None
                SYSTEM_CLOCK.sleep_ms(_POLL_MS)
            else:
                break
        self.lock.truncate(0)
        self.lock.write(str(os.getpid()))
        self.lock.flush()

    def _refusal(self) -> str:
        self.lock.seek(0)
        starter = self.lock.read() or "unknown"
        return (
            f"the data folder {self.path} is in use by another embedded server, started by process {starter}:"
            " stop it or choose another folder"
        )

    def release(self) -> None:
        """Free the folder for the next server; a temporary one is removed."""
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        # Closing alone would leave the lock to copies of the file that a fork of this process may hold.
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        self.lock.close()


def _start_failure(reason: str, log: str, port: int) -> ServerError:
    if "Address already in use" in log:
        what = f"port {port} is taken: stop the server that listens there, or use port 0"
        return _PortTaken(f"redis-server {reason}: {what}")
    tail = "\n  ".join(log.splitlines()[-_LOG_TAIL_LINES:])
    return ServerError(f"redis-server {reason}. Mend what its log says, then start it again:\n  {tail}")


def _pick_port() -> int:
    # Not `random`: test runners seed it alike in all their processes.
    return secrets.choice(_FREE_PORTS)


def _is_listening(unix_socket: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(unix_socket))
        except OSError:
            return False
    return True


def _spawn(command: Sequence[str], folder: _ClaimedFolder) -> subprocess.Popen[bytes]:
    """Start `command` in the folder as a child that dies with this process. Its output goes to the log."""
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
    spawned: Future[subprocess.Popen[bytes]] = Future()
    with folder.log.open("ab") as log:
        _spawner(os.getpid()).put((spawned, command, folder, log))
        return spawned.result()


_SpawnRequest = tuple[Future[subprocess.Popen[bytes]], Sequence[str], _ClaimedFolder, IO[bytes]]


@functools.cache
def _spawner(owner_pid: int) -> SimpleQueue[_SpawnRequest]:
    """The queue of this process's forking thread. By process, as a fork copies the cache but no thread."""
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
                umask=0o077,  # what is in Redis is for nobody else on this machine
                # Ctrl-C in a terminal goes to the whole process group; the server has to outlive the drain.
                start_new_session=True,
            )
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who waits for one or the other
            spawned.set_exception(error)
        else:
            spawned.set_result(process)
        # While it waits for the next one, this thread must not keep the last server's objects alive.
        del spawned, command, folder, log
