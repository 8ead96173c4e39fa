"""Quick starts of the commands that tests run as processes, hundreds of times.

Most of a start is imports: a third of a second of processor time. So each process that runs tests has another, its
template, which has made them, and forks for each start, with the arguments, the environment, the folder and the pipes of
that start. The fork becomes a child of the process that asked (prctl(2), PR_SET_CHILD_SUBREAPER): it is signalled,
killed, frozen and waited for like any that `subprocess` starts, and it ends as Python ends.

What a shell, a supervisor, a terminal or Spark starts is started as it is for users.
"""

import ctypes
import importlib
import io
import marshal
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, AnyStr

from tests.support.forks import get_ready_to_fork, receive, take_place

_MODULES = ("millstream.services.console", "millstream.testing.history", "uvicorn")
"""What commands import when they need it, beside their own modules."""
_ROOT = Path(__file__).parents[2]
_NUMBER_BYTES = 8
_PR_SET_CHILD_SUBREAPER = 36
_ONE_AT_A_TIME = threading.Lock()

_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_OPTIONS = (
    *("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell"),
    *_PIPES,
    *("restore_signals", "group", "extra_groups", "user", "umask", "start_new_session", "process_group"),
)
"""What `subprocess` of CPython 3.11 to 3.14 passes to `_execute_child` after the arguments."""
_ONLY_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("executable", "preexec_fn", "startupinfo", "group", "extra_groups", "user")),
    **dict.fromkeys(("shell", "start_new_session"), False),
    **dict.fromkeys(("umask", "process_group"), -1),
    **dict.fromkeys(("close_fds", "restore_signals"), True),
    "pass_fds": (),
    "creationflags": 0,
}
"""The options that have no effect on a fork, and their defaults."""


class Program(subprocess.Popen[AnyStr]):
    """`subprocess.Popen` of `[sys.executable, "-m", MODULE, ARGUMENT, ...]`.

    Raises ValueError for options and variables that a fork of the template cannot have, such as PYTHONUNBUFFERED.
    """

    def _execute_child(self, args: Any, *rest: Any) -> None:
        options = dict(zip(_OPTIONS, rest, strict=True))
        refused = [name for name, default in _ONLY_DEFAULTS.items() if options[name] != default]
        if refused:
            raise ValueError(f"a fork cannot have {', '.join(refused)}: start it with subprocess.Popen")
        if [*args[:2]] != [sys.executable, "-m"] or not args[2:]:
            raise ValueError(f"only {sys.executable} -m MODULE can be forked, not {args!r}")
        folder, environment = options["cwd"], options["env"]
        pipes = [options[name] for name in _PIPES]
        ours = (pipes[0], pipes[3], pipes[5])
        self.pid = _template().start(
            [*map(str, args[2:])],
            environment={**(os.environ if environment is None else environment)},
            folder=str(Path(folder or ".").absolute()),
            pipes=[inherited if pipe == -1 else pipe for inherited, pipe in enumerate(ours)],
        )
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _template() -> "_Template":
    with _ONE_AT_A_TIME:
        return _create_template()


@cache
def _create_template() -> "_Template":
    return _Template()


def end_template() -> None:
    """End the template of this process, if it has one."""
    with _ONE_AT_A_TIME:
        if _create_template.cache_info().currsize:
            _create_template().end()
            _create_template.cache_clear()


class _Template:
    """The process that forks, for the one whose children its forks become."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._variables = _read_at_start(os.environ)
        self._connection, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.quick_programs", str(its.fileno())],
                cwd=_ROOT,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def start(self, arguments: list[str], *, environment: dict[str, str], folder: str, pipes: Sequence[int]) -> int:
        """Fork; return the process id. Raises OSError if the template has ended, and ValueError."""
        if changed := dict(_read_at_start(environment).items() ^ self._variables.items()):
            raise ValueError(f"a fork has {', '.join(sorted(changed))} as its template has: use subprocess.Popen")
        request = marshal.dumps((arguments, environment, folder))
        with self._lock, _adopting_orphans():
            try:
                socket.send_fds(self._connection, [len(request).to_bytes(_NUMBER_BYTES)], pipes)
                self._connection.sendall(request)
                process = int.from_bytes(receive(self._connection, _NUMBER_BYTES))
                receive(self._connection, 1)  # it is a child of this process now
            except ConnectionError as error:
                raise OSError(f"the template (process {self._process.pid}) has ended, so it forks nothing") from error
            return process

    def end(self) -> None:
        """End the process. What it has forked goes on."""
        self._connection.close()
        self._process.wait()


def _read_at_start(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The variables that Python reads when it starts. PYTHONPATH is not among them: a fork sets its own path."""
    return {name: value for name, value in environment.items() if name.startswith("PYTHON") and name != "PYTHONPATH"}


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """During the block, what a process below this one has started becomes a child of this one when it ends."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _import_commands() -> None:
    from millstream.cli.main import COMMANDS

    for place, _, _ in COMMANDS.values():
        importlib.import_module(place.partition(":")[0])
    for name in _MODULES:
        importlib.import_module(name)
    get_ready_to_fork()


def _serve(connection: socket.socket) -> Sequence[str]:
    """Fork for each request. Returns its arguments in the fork; ends the template at the end of the connection."""
    while True:
        size, pipes, _, _ = socket.recv_fds(connection, _NUMBER_BYTES, 3)
        if not size:
            raise SystemExit
        request = receive(connection, int.from_bytes(size))
        between = os.fork()
        if not between:
            between_id = os.getpid()
            child = os.fork()
            if child:
                connection.sendall(child.to_bytes(_NUMBER_BYTES))
                os._exit(0)
            while os.getppid() == between_id:  # until the process that asked has become the parent
                os.sched_yield()
            arguments, environment, folder = marshal.loads(request)
            _become(environment, folder, pipes)
            return arguments  # type: ignore[no-any-return]
        os.waitpid(between, 0)
        connection.send(b"!")
        for pipe in pipes:
            os.close(pipe)


def _become(environment: dict[str, str], folder: str, pipes: Sequence[int]) -> None:
    """Take the place that a new Python would have."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    take_place(environment, folder, pipes)
    os.closerange(len(pipes), 1 + max(int(one.name) for one in Path("/proc/self/fd").iterdir()))
    added = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [folder, *added, *(one for one in sys.path[1:] if one not in inherited)]
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        mine = getattr(sys, name)
        stream = open(number, mode, encoding=mine.encoding, errors=mine.errors, closefd=False)  # noqa: SIM115
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=os.isatty(number), write_through=mine.write_through)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _main() -> None:
    signal_of_start = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that asks
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import_commands()
    module, *sys.argv[1:] = _serve(connection)
    connection.detach()
    signal.signal(signal.SIGINT, signal_of_start)
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
