"""The consoles of the pages: services start with the line that is shown, and operators' commands succeed."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from millstream.delivery import DeadLetterFilter, DeadLetterQueue
from millstream.redis_client.client import Client
from tests.support import commandline
from tests.support.commandline import running
from tests.support.pages import ROOT, consoles_of, shell_environment
from tests.support.processes import end
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli]

APP = """
from millstream import App, Message, Retry

app = App("shop")
SLOW = dict(delay_ms=3_600_000, max_delay_ms=3_600_000)


@app.handler("payments", key="account", retry=Retry(attempts=1, then="park"))
def charge(message: Message) -> None:
    raise RuntimeError("gateway says no")


@app.handler("refunds", key="account", retry=Retry(attempts=1, then="block", **SLOW))
def refund(message: Message) -> None:
    raise RuntimeError("gateway is away")


@app.handler("orders")
def old(message: Message) -> None:
    raise ValueError("no")
"""


@contextmanager
def service(page: str, folder: Path, url: str, output: Path, **more: str) -> Iterator[None]:
    """The commands of a page's only console, the last of which is a service; Ctrl-C ends it. It prints to `output`."""
    (console,) = consoles_of(page)
    with output.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-c", console.commands],
            cwd=folder,
            env=shell_environment(url, {"PYTHONUNBUFFERED": "1", **more}),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield
        os.killpg(shell.pid, signal.SIGINT)
        shell.wait(FAIL_SAFE_S)
    finally:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def await_line(output: Path, wanted: str) -> None:
    """Wait until the service has printed this line; a warning may come before."""

    def is_printed() -> bool:
        return wanted.strip() in (line.strip() for line in output.read_text().splitlines())

    eventually(is_printed, f"the line {wanted!r}", log=output.read_text)


@pytest.mark.parametrize(
    ("page", "variable"),
    [
        ("docs/serve.md", "MILLSTREAM_SERVE_PORT"),
        ("docs/master.md", "MILLSTREAM_MASTER_PORT"),
        ("docs/console.md", "MILLSTREAM_CONSOLE_PORT"),
    ],
)
def test_a_service_starts_with_the_line_of_its_page(client: Client, tmp_path: Path, page: str, variable: str) -> None:
    (shown,) = consoles_of(page)[0].outputs
    output = tmp_path / "output"
    with commandline.reserved_port() as port, service(page, ROOT, client.url, output, **{variable: str(port)}):
        await_line(output, re.sub("80[08]0", str(port), shown))


def test_dev_starts_with_the_lines_of_its_page(client: Client, tmp_path: Path) -> None:
    (console,) = consoles_of("docs/servers.md")
    url, _server, *others = console.outputs  # which server it is, the machine decides
    with (
        commandline.reserved_port() as port,
        service("docs/servers.md", tmp_path, client.url, tmp_path / "output", MILLSTREAM_DEV_PORT=str(port)),
    ):
        for line in (url, *others):
            await_line(tmp_path / "output", line.replace("6379", str(port)))


def test_the_workers_of_the_page_on_workers_process_a_message(client: Client, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    client.execute("XADD", "orders", "*", "customer", "ann")

    log = tmp_path / "log"
    with service("docs/worker.md", tmp_path, client.url, log):
        eventually(lambda: client.execute("XLEN", "notes"), "an output", log=log.read_text)


# --- What operators type ---

NOT_HERE = ("redis-check-aof", "millstream run ")
"""Commands of the runbook that other tests run: on a server that was killed, and on Spark."""

FOUND: Mapping[str, int] = {"millstream doctor": 1, "millstream check app.py:app --only charge --yes": 1}
"""The commands of the runbook that report by their exit code."""


@pytest.fixture
def broken_shop(client: Client, tmp_path: Path) -> Path:
    """An app whose handlers have each left a key or a message stuck, as the runbook has them; its worker has stopped."""
    (tmp_path / "broken_shop.py").write_text(APP)
    with running("worker", str(tmp_path / "broken_shop.py:app"), url=client.url) as worker:
        for stream, account in (("payments", "a1"), ("refunds", "a3"), ("orders", "")):
            client.execute("XADD", stream, "1795441877961-0", "account", account)

        def stuck() -> bool:
            return sorted(keys(client)) == ["a1", "a3"] and len(letters(client)) == 1

        eventually(stuck, "two stuck keys and a dead letter", log=lambda: (keys(client), letters(client)))
        assert end(worker) == 0
    return tmp_path


def keys(client: Client) -> list[str]:
    """The keys that `key list` shows."""
    return [row["key"] for row in commandline.call("key", "list", "--json", url=client.url).json_lines()]


def letters(client: Client) -> list[str]:
    """The ids of all dead letters."""
    return [filed.letter_id for filed in DeadLetterQueue(client).find(DeadLetterFilter())]


def test_the_commands_of_the_runbook_succeed_where_keys_are_stuck(
    client: Client, broken_shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [line for block in consoles_of("docs/operations/runbook.md") for line in block.commands.splitlines()]
    chosen = [line for line in script if not line.startswith(NOT_HERE)]
    assert len(chosen) == len(script) - len(NOT_HERE)
    names = {
        "LETTER_ID": letters(client)[0],
        "--reason bad-output": "--reason failed",
        "app.py:": "broken_shop.py:",  # `check` imports it into this process, where each module has a name of its own
    }
    monkeypatch.chdir(broken_shop)
    for line in chosen:
        command = line
        for old, new in names.items():
            command = command.replace(old, new)
        done = entered(command, client.url)
        assert done.code == expected(line), f"{command}: {done}"


def entered(line: str, url: str) -> commandline.Outcome:
    """What a line of a console that has only a command of millstream does: the words are split as by a shell."""
    program, *words = shlex.split(line, comments=True)
    assert program == "millstream"
    return commandline.call(*words, url=url)


def expected(command: str) -> int:
    """The exit code of a command on that Redis."""
    return FOUND.get(command.partition("#")[0].strip(), 0)


def test_the_commands_of_the_page_on_upgrading_succeed_where_nothing_is_wrong(client: Client, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "before"):
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / "examples" / "shop.py", folder / "app.py")
    client.execute("XADD", "orders", "*", "customer", "ann", "amount", "10")
    (console,) = consoles_of("docs/operations/upgrading.md")
    done = subprocess.run(
        ["bash", "-e", "-c", console.commands],
        cwd=tmp_path,
        env=shell_environment(client.url),
        capture_output=True,
        text=True,
        timeout=FAIL_SAFE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not client.execute("EXISTS", "totals")


def test_the_commands_of_the_cookbook_remove_a_key(client: Client, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "shop.py", tmp_path)
    with running("worker", str(tmp_path / "shop.py:app"), url=client.url) as worker:
        client.execute("XADD", "orders", "*", "customer", "ann", "amount", "10")
        eventually(lambda: worker.poll() is not None or client.execute("XLEN", "totals"), "an output, or its end")
        assert end(worker) == 0, "a worker that is killed may leave the key leased"
    (console,) = consoles_of("docs/guides/cookbook.md")
    for line in console.commands.splitlines():
        done = entered(line, client.url)
        assert done.code == 0, f"{line}: {done}"
    assert commandline.call("state", "show", "shop.total", "ann", url=client.url).code == 1
