"""`millstream check`: what would become of real entries, without any change in Redis."""

import secrets
from pathlib import Path
from typing import Any

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.commandline import call
from tests.support.waiting import eventually
from tests.support.workers import fill, make, working

pytestmark = [pytest.mark.cli]

APP = """
from millstream import App, Message, Reject, State
app = App("app")

@app.handler("in", key="n", into="out", name="handle")
def handle(message: Message, state: State) -> dict:
    n = int(message.fields["n"])
    state["count"] = state.get("count", 0) + 1
    if n % 10 == 1:
        raise Reject("no ones")
    if n % 10 == 2:
        raise ValueError("redis://user:secret@host:1")
    return {"n": n, "count": state["count"]}

@app.handler("in", name="in_lists")
async def in_lists(messages: list[Message]) -> None:
    if any(one.text("n") == "5" for one in messages):
        raise KeyError("five")

@app.handler("in", key="custommer", name="misspelt")
def misspelt(message: Message) -> None: ...
"""


@pytest.fixture
def app(tmp_path: Path) -> str:
    """The path of an app with broken handlers."""
    path = tmp_path / f"checked_{secrets.token_hex(4)}.py"  # each test imports its own
    path.write_text(APP)
    return str(path)


def dump(client: Client) -> dict[bytes, Any]:
    return {name: client.execute("DUMP", name) for name in client.execute("KEYS", "*")}


def test_check_reports_the_outcome_of_each_message_and_changes_nothing(client: Client, app: str) -> None:
    fill(client, 50)
    client.execute("HSET", HandlerKeys("app", "handle", "in").state, "0", b"\x81\xa5count\x07")
    before = dump(client)
    checked = call("check", app, "--yes", "--json", "--url", client.url)
    assert dump(client) == before
    assert checked.code == 1
    handle, lists, misspelt = checked.json()["handlers"]
    assert (handle["ok"], handle["rejected"], handle["failed"], handle["outputs"]) == (40, 5, 5, 40)
    (failure,) = handle["failures"]
    assert failure["cause"].startswith(f"failed (ValueError at {Path(app).name}:12)")
    assert "in handle" in failure["traceback"]
    assert "secret" not in checked.out
    assert (lists["ok"], lists["failed"]) == (49, 1)
    assert (misspelt["ok"], misspelt["failures"][0]["cause"], misspelt["failures"][0]["count"]) == (
        0,
        "missing-key",
        50,
    )
    output = call("check", app, "--only", "handle", "--sample", "20", "--yes", "--url", client.url)
    assert output.out.startswith(
        "app.handle: 16 ok with 16 outputs, 2 rejected, 2 would become dead letters, of the first 20 uncommitted entries\n"
    )
    assert "not checked: what the handlers do outside Redis" in output.err


def test_check_starts_after_the_committed_offset_and_uses_the_newest_entries_if_none_are_left(
    client: Client, app: str
) -> None:
    fill(client, 30)
    with working(client, make(lambda message: None, key="n", into=None)) as loop:
        eventually(lambda: loop.loop_metrics.committed == 30)
    command = ("check", app, "--only", "handle", "--yes", "--json", "--url", client.url)
    (done,) = call(*command).json()["handlers"]
    assert (done["of"], done["ok"] + done["rejected"] + done["failed"]) == ("newest", 30)
    client.execute("XADD", "in", "*", "n", 40)
    (one,) = call(*command).json()["handlers"]
    assert (one["of"], one["ok"], one["failed"]) == ("uncommitted", 1, 0)
    (three,) = call(*command, "--newest", "--sample", "3").json()["handlers"]
    assert (three["of"], three["ok"]) == ("newest", 3)


def test_check_asks_for_consent_first_as_it_runs_the_handlers(client: Client, app: str) -> None:
    refused = call("check", app, "--url", client.url)
    assert (refused.code, refused.out) == (2, "")
    assert "--yes" in refused.err
