"""The project of the page on Django's tasks runs as it is printed, on a Python that Django supports, with a real worker."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.commandline import environment
from tests.support.pages import blocks_of, write_files
from tests.support.pythons import TESTED, find_python
from tests.support.requirements import skip_without
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.wheels import build, install, new_environment, reaches_index

pytestmark = [pytest.mark.cli, pytest.mark.xdist_group("django")]

PAGE = "docs/django.md"
DJANGO = "django>=6,<7"
PRINTED = next(block.outputs for block in blocks_of(PAGE) if not block.language)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with millstream and Django."""
    skip_without(os.environ.get("CI"), "half a minute's work of pip: where CI is set")
    python = next((found for one in reversed(TESTED) if one != "3.11" and (found := find_python(one))), None)
    skip_without(python, "there is no Python 3.12 or newer here, which Django 6 needs")
    assert python is not None
    (wheel,) = build(tmp_path_factory.mktemp("wheel"), "wheel")
    own = new_environment(python, tmp_path_factory.mktemp("environment"))
    try:
        install(own, str(wheel), DJANGO)
    except RuntimeError:
        skip_without(reaches_index(python, "django"), "pip reaches no index with Django from here")
        raise
    return Path(own).parent


class Project:
    """The files of the page in a folder, and the environment that its programs run in."""

    def __init__(self, folder: Path, programs: Path, url: str) -> None:
        self._folder = folder
        self._programs = programs
        self._environment = environment(url)
        self._environment.pop("PYTHONPATH", None)

    def python(self, *args: str) -> list[str]:
        """Run Python to its end; return the lines that it printed."""
        command = [str(self._programs / "python"), *args]
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=FAIL_SAFE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    @contextmanager
    def worker(self) -> Iterator[None]:
        """A worker during the block."""
        command = [str(self._programs / "millstream"), "worker", "worker.py:app"]
        with (self._folder / "worker.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=self._folder, env=self._environment, stdout=log, stderr=log)
            try:
                yield
            finally:
                process.terminate()
                process.wait(FAIL_SAFE_S)


@pytest.fixture
def project(client: Client, programs: Path, tmp_path: Path) -> Project:
    write_files(PAGE, tmp_path)
    return Project(tmp_path, programs, client.url)


def test_the_tasks_of_a_project_run_on_a_worker_and_their_results_are_read_by_id(
    project: Project, client: Client
) -> None:
    with project.worker():
        assert project.python("order.py") == PRINTED
    (letter,) = DeadLetterQueue(client).find(DeadLetterFilter(app="django", handler="run_task"))
    assert letter.letter is not None
    assert (letter.letter.reason, letter.letter.key, letter.letter.attempts) == ("failed", b"ann", 3)


RESULTS = """
import sys
from datetime import timedelta
import worker
from django.tasks import task_backends
from django.tasks.exceptions import TaskResultDoesNotExist
from django.utils import timezone
from shop_tasks import send_receipt

if len(sys.argv) == 1:
    print(send_receipt.enqueue(7, customer="bob").id)
    print(send_receipt.using(run_after=timezone.now() + timedelta(seconds=1)).enqueue(8, customer="bob").id)
else:
    for one in sys.argv[1:]:
        try:
            found = send_receipt.get_result(one)
            print(found.status, found.args, found.kwargs, found.attempts)
        except TaskResultDoesNotExist:
            print("none")
"""


def test_a_call_is_ready_until_a_worker_runs_it_and_runs_once_though_its_message_comes_again(
    project: Project, client: Client
) -> None:
    ids = project.python("-c", RESULTS)
    assert project.python("-c", RESULTS, *ids, "other") == [
        "READY [7] {'customer': 'bob'} 0",
        "READY [8] {'customer': 'bob'} 0",
        "none",
    ]
    ((_, pairs),) = client.execute("XRANGE", "tasks.mails", "-", "+")
    client.execute("XADD", "tasks.mails", "*", *pairs)
    with project.worker():
        done = [f"SUCCESSFUL [{order}] {{'customer': 'bob'}} 1" for order in (7, 8)]
        eventually(lambda: project.python("-c", RESULTS, *ids) == done, "the results")
        keys = HandlerKeys("django", "run_task", "tasks.mails")
        eventually(lambda: client.execute("HGET", keys.meta, "committed") == b"3", "the repeated message")
    assert project.python("-c", RESULTS, *ids) == done
