"""What a run of tests starts and writes is gone when the run is, however it ends."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes_left_behind import TOKEN_VARIABLE, processes_of
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli]

ROOT = Path(__file__).parents[2]
RUN = """
import subprocess, sys, time
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.processes_left_behind import RunGuardian

guardian = RunGuardian()
server = EmbeddedServer()
server.start()
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
daemon = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
(guardian.folder / "file").write_text("x")
print(guardian.folder, server.pid, daemon.pid, flush=True)
{ending}
"""
ENDINGS = {
    "killed": (signal.SIGKILL, "time.sleep(600)"),
    "interrupted": (signal.SIGINT, "time.sleep(600)"),
    "terminated": (signal.SIGTERM, "time.sleep(600)"),
    "over": (None, "sys.exit()"),
}


@pytest.fixture(params=ENDINGS)
def ended_run(request: pytest.FixtureRequest) -> Iterator[tuple[Path, list[int]]]:
    number, ending = ENDINGS[request.param]
    command = [sys.executable, "-c", RUN.format(ending=ending)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        folder, *pids = run.stdout.readline().split()
        if number is not None:
            run.send_signal(number)
        run.wait(FAIL_SAFE_S)
        yield Path(folder), [int(pid) for pid in pids]


def test_no_process_survives_a_run_of_tests(ended_run: tuple[Path, list[int]]) -> None:
    folder, pids = ended_run
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of all processes")
    eventually(lambda: not folder.exists(), "the end of the folder")


def test_a_process_that_a_test_leaves_running_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", "forgotten"]
    with subprocess.Popen(command, env={TOKEN_VARIABLE: "of-this-test"}) as forgotten:
        try:
            assert [*processes_of("of-this-test", tmp_path)] == [forgotten.pid]
            assert processes_of("of-this-test", tmp_path)[forgotten.pid].endswith("forgotten")
            assert not processes_of("of-another-test", tmp_path)
        finally:
            forgotten.kill()
    assert not processes_of("of-this-test", tmp_path)


def test_java_makes_its_temporary_files_in_the_folder_of_the_run() -> None:
    java = shutil.which("java", path=os.environ.get("JAVA_HOME", "") + "/bin" + os.pathsep + os.environ["PATH"])
    assert java is not None
    shown = subprocess.run([java, "-XshowSettings:properties", "-version"], capture_output=True, text=True, check=True)
    assert f"java.io.tmpdir = {tempfile.gettempdir()}\n" in shown.stderr
    assert Path(tempfile.gettempdir()).name.startswith("ms-")
