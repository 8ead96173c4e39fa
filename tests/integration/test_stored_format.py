"""The number of the stored format: code that does not know a newer format refuses to start, and loses nothing."""

import re
from pathlib import Path

import pytest

from millstream.admin.doctor import diagnose
from millstream.delivery.commit_store import FORMAT, CommitStore
from millstream.errors import Incompatible
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.commandline import call, run
from tests.support.waiting import eventually
from tests.support.workers import double, ending, fill, make, working

pytestmark = [pytest.mark.worker, pytest.mark.keys, pytest.mark.spark]

KEYS = HandlerKeys("app", "handle", "in")
NEWER = FORMAT + 1
REFUSAL = (
    rf"app\.handle on in is stored in format {NEWER} by a newer millstream, and this one reads formats up to {FORMAT}"
)


def stored_format(client: Client) -> int | None:
    found = client.execute("HGET", KEYS.meta, "format")
    return None if found is None else int(found)


@pytest.mark.parametrize("earlier", [None, FORMAT - 1])
@pytest.mark.parametrize("options", [{}, {"key": "n"}, {"pattern": "i*"}])
def test_a_worker_stores_the_format_that_it_writes_and_reads_earlier_ones(
    client: Client, options: dict[str, str], earlier: int | None
) -> None:
    if earlier is not None:
        client.execute("HSET", KEYS.meta, "format", earlier)
    fill(client, 1)
    with working(client, make(double, **options)):
        eventually(lambda: client.execute("XLEN", "out") == 1, "the message")
    assert stored_format(client) == FORMAT


def test_a_run_on_spark_stores_the_format_that_it_writes(client: Client) -> None:
    CommitStore(client, app="app", handler="handle", token=1).begin_run(["in"])
    assert stored_format(client) == FORMAT


@pytest.mark.parametrize("options", [{}, {"key": "n"}, {"pattern": "i*"}])
def test_workers_refuse_to_start_on_a_newer_format_and_lose_nothing(client: Client, options: dict[str, str]) -> None:
    with working(client, make(double, **options)):
        fill(client, 5)
        eventually(lambda: client.execute("XLEN", "out") == 5, "the first messages")
    fill(client, 5, first=5)
    client.execute("HSET", KEYS.meta, "format", NEWER)
    before = client.execute("HGETALL", KEYS.meta)
    with ending(Incompatible, client, make(double, **options), match=REFUSAL):
        pass
    assert client.execute("HGETALL", KEYS.meta) == before
    client.execute("HSET", KEYS.meta, "format", FORMAT)
    with working(client, make(double, **options)):
        eventually(lambda: client.execute("XLEN", "out") == 10, "the other messages")
    assert [int(fields[1]) for _, fields in client.execute("XRANGE", "out", "-", "+")] == list(range(10))


APP = """
from millstream import App, Message

app = App("app")

@app.handler("in")
def handle(message: Message):
    pass
"""


def test_the_command_of_workers_says_in_one_line_that_a_newer_version_has_stored_a_handler(
    client: Client, tmp_path: Path
) -> None:
    (tmp_path / "older_app.py").write_text(APP)
    fill(client, 1)
    client.execute("HSET", KEYS.meta, "format", NEWER)
    ended = run("worker", str(tmp_path / "older_app.py"), url=client.url)
    assert ended.code == 1
    assert "Traceback" not in ended.err
    (line,) = (line for line in ended.err.splitlines() if "app.handle" in line)
    assert re.fullmatch(rf"error: {REFUSAL}: upgrade this process; nothing is lost", line)


def test_a_run_on_spark_refuses_to_begin_on_a_newer_format_and_raises_no_epoch(client: Client) -> None:
    CommitStore(client, app="app", handler="handle", token=1).begin_run(["in"])
    client.execute("HSET", KEYS.meta, "format", NEWER)
    with pytest.raises(Incompatible, match=REFUSAL):
        CommitStore(client, app="app", handler="handle", token=2).begin_run(["in"])
    assert client.execute("HGET", KEYS.meta, "epoch") == b"1"


def test_info_and_doctor_say_that_a_newer_version_has_stored_a_handler(client: Client) -> None:
    fill(client, 1)
    CommitStore(client, app="app", handler="handle", token=1).begin_run(["in"])
    assert call("info", "--json", url=client.url).json()["handlers"][0]["stored_format"] == FORMAT
    client.execute("HSET", KEYS.meta, "format", NEWER)
    row = call("info", "--json", url=client.url).json()["handlers"][0]
    assert row["stored_format"] == NEWER
    assert f"stored in format {NEWER} by a newer millstream" in row["problem"]
    assert f"stored in format {NEWER} by a newer millstream" in call("info", url=client.url).err
    (finding,) = (one for one in diagnose(client).findings if one.check == "format")
    assert finding.severity == "problem"
    assert "app.handle on in: stored in format" in finding.what
