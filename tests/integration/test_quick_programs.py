"""What tests start as forks of a template is what Python itself would start."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.quick_programs import Program, end_template
from tests.support.waiting import FAIL_SAFE_S

pytestmark = pytest.mark.cli

ABOUT = """
import atexit, json, os, signal, sys, threading, time
about = {
    "arguments": sys.argv,
    "name": __name__,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "path": sys.path,
    "parent": os.getppid(),
    "group": os.getpgid(0),
    "signals": {number.name: str(signal.getsignal(number)).split(" at ")[0] for number in signal.Signals},
    "descriptors": [int(name) for name in os.listdir("/proc/self/fd")][:-1],
    "streams": [
        [one.encoding, one.errors, one.mode, one.line_buffering, one.write_through, one.isatty(), one is original]
        for one, original in zip((sys.stdin, sys.stdout, sys.stderr), (sys.__stdin__, sys.__stdout__, sys.__stderr__))
    ],
    "given": sys.stdin.read(),
}
print(json.dumps(about))
print("an error", file=sys.stderr)
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.01), print("a thread ends"))).start()
"""
ENDS = {
    "pass": 0,
    "import sys; sys.exit(7)": 7,
    "import sys; sys.exit('a text')": 1,
    "1 / 0": 1,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "raise KeyboardInterrupt": -signal.SIGINT,
}
"""Programs, and how Python says that they ended."""
READS_A_REQUEST = """#!{python}
import socket, sys
connection = socket.socket(fileno=int(sys.argv[-1]))
left = int.from_bytes(connection.recv(8))
while left:
    left -= len(connection.recv(left))
"""
"""A template that ends between a request and its reply."""

Start = Callable[..., "subprocess.Popen[str]"]
STARTS: tuple[Start, ...] = (subprocess.Popen, Program)


def module(folder: Path, program: str) -> dict[str, str]:
    """The environment in which `program` is the module `about`."""
    (folder / "about.py").write_text(program)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "ONLY": "here"}


def test_it_has_the_arguments_the_folder_the_pipes_the_signals_and_the_environment_that_python_has(
    tmp_path: Path,
) -> None:
    environment = module(tmp_path, ABOUT)
    command = [sys.executable, "-m", "about", "an argument", "--option"]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    seen = []
    for start in STARTS:
        with start(command, env=environment, cwd=tmp_path, text=True, **pipes) as process:
            seen.append((*process.communicate("a text", FAIL_SAFE_S), process.returncode))
    whole, quick = seen
    assert json.loads(quick[0].splitlines()[0]) == json.loads(whole[0].splitlines()[0])
    assert quick[0].splitlines()[1:] == whole[0].splitlines()[1:] == ["a thread ends", "at exit"]
    assert quick[1:] == whole[1:] == ("an error\n", 0)


@pytest.mark.parametrize("program", ENDS)
def test_it_ends_as_python_ends(program: str, tmp_path: Path) -> None:
    environment = module(tmp_path, program)
    codes = []
    for start in STARTS:
        with start([sys.executable, "-m", "about"], env=environment, stderr=subprocess.DEVNULL, text=True) as process:
            codes.append(process.wait(FAIL_SAFE_S))
    assert codes == [ENDS[program], ENDS[program]]


def test_it_is_frozen_and_killed_as_any_child(tmp_path: Path) -> None:
    environment = module(tmp_path, "import sys; print('here', flush=True); sys.stdin.read()")
    command = [sys.executable, "-m", "about"]
    with Program(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGSTOP)
        assert os.waitpid(process.pid, os.WUNTRACED) == (process.pid, signal.SIGSTOP << 8 | 0x7F)
        process.kill()
        assert process.wait(FAIL_SAFE_S) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("executable", "/bin/true"),
        ("preexec_fn", os.getpid),
        ("close_fds", False),
        ("pass_fds", (0,)),
        ("shell", True),
        ("restore_signals", False),
        ("group", os.getgid()),
        ("extra_groups", [os.getgid()]),
        ("user", os.getuid()),
        ("umask", 0o022),
        ("start_new_session", True),
        ("process_group", 0),
    ],
)
def test_an_option_that_a_fork_cannot_have_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^a fork cannot have {name}: "):
        Program([sys.executable, "-m", "about"], **{name: value})


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "about.py"],
        [sys.executable, "-c", "pass"],
        [sys.executable, "-I", "-m", "about"],
        [sys.executable, "-m"],
        ["python", "-m", "about"],
        f"{sys.executable} -m about",
    ],
)
def test_a_command_that_runs_no_module_of_this_python_is_refused(command: Any) -> None:
    with pytest.raises(ValueError, match=" -m MODULE can be forked, not "):
        Program(command)


@pytest.fixture
def no_template() -> Iterator[None]:
    """Without a template before the test; it ends the test's own."""
    end_template()
    yield
    end_template()


@pytest.mark.usefixtures("no_template")
def test_a_variable_that_python_reads_when_it_starts_is_refused_where_it_is_not_the_template_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUTF8", "1")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command, environment = [sys.executable, "-m", "about"], module(tmp_path, "pass")
    with Program(command, env=environment) as process:
        assert process.wait(FAIL_SAFE_S) == 0
    without = {name: value for name, value in environment.items() if name != "PYTHONUTF8"}
    for name, other in (
        ("PYTHONUTF8", {**environment, "PYTHONUTF8": "0"}),
        ("PYTHONUTF8", without),
        ("PYTHONUNBUFFERED", {**environment, "PYTHONUNBUFFERED": "1"}),
    ):
        with pytest.raises(ValueError, match=rf"^a fork has {name} as its template has: "):
            Program(command, env=other)


@pytest.mark.usefixtures("no_template")
def test_a_start_after_the_template_was_killed_is_refused_and_the_next_template_starts_again(tmp_path: Path) -> None:
    environment = module(tmp_path, "pass")
    command = [sys.executable, "-m", "about"]
    others = {*psutil.Process().children()}
    with Program(command, env=environment) as process:
        assert process.wait(FAIL_SAFE_S) == 0
    (template,) = {*psutil.Process().children()} - others
    template.kill()
    os.waitid(os.P_PID, template.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        with pytest.raises(OSError, match=rf"^the template \(process {template.pid}\) has ended"):
            Program(command, env=environment)
    end_template()
    with Program(command, env=environment) as process:
        assert process.wait(FAIL_SAFE_S) == 0


@pytest.mark.usefixtures("no_template")
def test_a_start_whose_template_ends_before_its_reply_is_refused_and_has_no_process_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template"
    template.write_text(READS_A_REQUEST.format(python=sys.executable))
    template.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(template))
    with pytest.raises(OSError, match=r"^the template .* has ended"):
        Program([sys.executable, "-m", "about"])


@pytest.mark.usefixtures("no_template")
def test_threads_that_start_their_first_programs_at_once_have_one_template(tmp_path: Path) -> None:
    environment, others = module(tmp_path, "pass"), {*psutil.Process().children()}
    together = threading.Barrier(4)

    def start(_: int) -> int:
        together.wait(FAIL_SAFE_S)
        with Program([sys.executable, "-m", "about"], env=environment) as process:
            return process.wait(FAIL_SAFE_S)

    with ThreadPoolExecutor(together.parties) as threads:
        assert [*threads.map(start, range(together.parties))] == [0] * together.parties
    assert len({*psutil.Process().children()} - others) == 1
