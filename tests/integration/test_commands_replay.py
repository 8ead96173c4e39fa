"""`millstream replay`: the history of one key, run again without any change in Redis."""

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millstream.partitions.partitioned_producer import PartitionedProducer
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import REDRIVE_FIELD
from tests.support.command_stats import commands_run
from tests.support.commandline import Outcome, call, in_a_terminal, run
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli]

APP = """
import os, time
from pathlib import Path
from millstream import App, Message, Reject, Retry, State
app = App("app")

@app.handler("in", key="k", into="out", retry=Retry(attempts=3, delay_ms=60_000, max_delay_ms=60_000))
def total(message: Message, state: State) -> dict:
    print("the handler's own output")
    what = message.text("what")
    if what == "reject":
        raise Reject("not wanted")
    if what == "fail":
        raise ValueError("redis://user:secret@host:1")
    if what == "third" and message.attempt < 3:
        raise ValueError("again")
    state["n"] = state.get("n", 0) + int(message.fields["n"])
    return {"n": state["n"]}
"""


class Replays:
    """Writes versions of an app, and replays them."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self._folder = folder

    def app(self, text: str = APP) -> str:
        path = self._folder / f"replayed_{secrets.token_hex(4)}.py"  # each test imports its own
        path.write_text(text)
        return str(path)

    def __call__(self, app: str, handler: str, key: str, *options: str) -> Outcome:
        return call("replay", app, handler, key, "--yes", *options, "--url", self.client.url)

    def lines(self, app: str, handler: str, key: str, *options: str) -> list[Any]:
        """The messages, and what each led to."""
        shown = self(app, handler, key, "--json", *options)
        assert shown.code in (0, 1), shown.err
        return [one for one in shown.json_lines() if one["event"] == "message"]


@pytest.fixture
def replays(client: Client, tmp_path: Path) -> Replays:
    return Replays(client, tmp_path)


def add(client: Client, entry_id: str, key: str = "ann", *, stream: str = "in", **fields: object) -> None:
    pairs = [part for name, value in ({"n": 1} | fields).items() for part in (name, str(value))]
    client.execute("XADD", stream, entry_id, "k", key, *pairs)


@contextmanager
def monitored(server: EmbeddedServer) -> Iterator[Callable[[], list[str]]]:
    """The commands that clients send within the block, by MONITOR."""
    seen: list[str] = []
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"MONITOR\r\n")
        lines = connection.makefile("r")
        assert lines.readline().strip() == "+OK"
        reader = threading.Thread(target=lambda: seen.extend(lines))
        reader.start()
        yield lambda: seen
        with Client(server.url) as last:
            last.execute("ECHO", "the end")
        eventually(lambda: any("the end" in one for one in seen), "the last command")
        connection.shutdown(socket.SHUT_RDWR)
        reader.join()


def test_a_replay_writes_nothing_to_redis(millstream_fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    with Client(millstream_fresh_server.url) as client:
        replays = Replays(client, tmp_path)
        for n in range(1, 40):
            add(client, f"{n}-1", "ann" if n % 2 else "bob", what=("fail", "reject", "", "third")[n % 4])
        app, new = replays.app(), replays.app(APP.replace('["n"] = ', '["m"] = '))
        client.execute("SET", "other", "value")

        def keyspace() -> dict[bytes, Any]:
            return {name: client.execute("DUMP", name) for name in sorted(client.execute("KEYS", "*"))}

        before, counted = keyspace(), commands_run(client.execute)
        with monitored(millstream_fresh_server) as commands:
            assert replays(app, "total", "ann", "--new", new).code == 1
        assert keyspace() == before
        sent = {one.split('"')[1].upper() for one in commands() if '"' in one and "the end" not in one}
        assert {"XINFO", "XRANGE"} <= sent <= {"XINFO", "XRANGE", "EVALSHA", "EVAL", "CLIENT", "HELLO", "SELECT"}
        run_since = commands_run(client.execute) - counted
        names = {name.partition("|")[0] for name in run_since}
        ours = {"info", "keys", "dump", "monitor", "echo"}
        assert names - ours <= {"xinfo", "xrange", "evalsha", "eval", "client", "hello", "select"}


def test_each_message_of_the_key_is_shown_with_its_outputs_and_the_state_after_it(replays: Replays) -> None:
    for n in range(1, 5):
        add(replays.client, f"{n}-1", n=n)
        add(replays.client, f"{n}-2", "bob", n=100)
    shown = replays(replays.app(), "total", "ann")
    assert shown.code == 0
    assert shown.out.splitlines() == [
        '1-1 done  state {"n": 1}  output {"n": "1"}',
        '2-1 done  state {"n": 3}  output {"n": "3"}',
        '3-1 done  state {"n": 6}  output {"n": "6"}',
        '4-1 done  state {"n": 10}  output {"n": "10"}',
    ]
    assert "in is kept from 1-1 on; none is gone" in shown.err
    assert "4 messages of ann: 4 done" in shown.err
    assert "not simulated" in shown.err
    _, first, *_ = replays(replays.app(), "total", "ann", "--json").json_lines()
    assert first == {
        "event": "message",
        "stream": "in",
        "id": "1-1",
        "key": "ann",
        "result": "done",
        "outputs": [{"fields": {"n": "1"}}],
        "timers": [],
        "state": {"n": 1},
        "attempts": 1,
        "reason": None,
        "error": "",
        "traceback": "",
    }


def test_failures_are_retried_without_waiting_and_leave_the_state_as_it_was(replays: Replays) -> None:
    for n, what in enumerate(("", "fail", "reject", "third", ""), 1):
        add(replays.client, f"{n}-1", what=what)
    shown = replays(replays.app(), "total", "ann", "--json")
    found = [one for one in shown.json_lines() if one["event"] == "message"]
    assert [(one["result"], one["reason"], one["attempts"], one["state"]["n"]) for one in found] == [
        ("done", None, 1, 1),
        ("dead-letter", "failed", 3, 1),
        ("dead-letter", "rejected", 1, 1),
        ("done", None, 3, 2),
        ("done", None, 1, 3),
    ]
    assert "in total" in found[1]["traceback"]
    assert "secret" not in shown.out
    assert "own output" not in shown.out
    text = replays(replays.app(), "total", "ann").out
    assert '3-1 dead letter (rejected): not wanted  state {"n": 1}' in text
    assert "2-1 dead letter (failed, 3 attempts): ValueError: " in text


def test_two_versions_are_compared_and_a_difference_is_code_1(replays: Replays) -> None:
    for n in range(1, 4):
        add(replays.client, f"{n}-1", n=n)
    old = replays.app()
    same = replays(old, "total", "ann", "--new", replays.app())
    assert (same.code, len(same.out.splitlines())) == (0, 3)
    assert "both versions agree" in same.err
    new = replays.app(APP.replace('int(message.fields["n"])', 'min(2, int(message.fields["n"]))'))
    shown = replays(old, "total", "ann", "--new", new)
    assert shown.code == 1
    assert shown.out.splitlines() == [
        '  1-1 done  state {"n": 1}  output {"n": "1"}',
        '  2-1 done  state {"n": 3}  output {"n": "3"}',
        '- 3-1 done  state {"n": 6}  output {"n": "6"}',
        '+ 3-1 done  state {"n": 5}  output {"n": "5"}',
    ]
    assert "1 differs, the first at 3-1" in shown.err
    lines = replays(old, "total", "ann", "--code", new, "--json").json_lines()
    assert [one["differs"] for one in lines if one["event"] == "message"] == [False, False, True]
    assert (lines[-1]["differing"], lines[-1]["first_difference"]) == (1, "3-1")


TIMERS = """
from millstream import After, App, Cancel, Message
app = App("app")

@app.handler("in", key="k")
def remind(message: Message) -> After | Cancel:
    if message.text("what") == "paid":
        return Cancel(name="remind")
    return After("30m", {"what": "remind"}, name="remind")
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [('After("30m"', 'After("31m"'), ('{"what": "remind"}', '{"what": "ask"}'), ('Cancel(name="remind")', "None")],
    ids=["delay", "message", "cancel"],
)
def test_versions_that_differ_in_a_timer_alone_differ(replays: Replays, old: str, new: str) -> None:
    for n, what in enumerate(("placed", "paid"), 1):
        add(replays.client, f"{n}-1", what=what)
    app = replays.app(TIMERS)
    shown = replays(app, "remind", "ann", "--new", replays.app(TIMERS))
    assert shown.code == 0
    assert shown.out.splitlines() == [
        '  1-1 done  timer remind after 1,800,000 ms {"k": "ann", "what": "remind"}',
        "  2-1 done  timer remind cancelled",
    ]
    changed = replays.app(TIMERS.replace(old, new))
    assert replays(app, "remind", "ann", "--new", changed).code == 1
    found = replays.lines(app, "remind", "ann", "--new", changed)
    assert [one["timers"] for one in found] == [
        [{"name": "remind", "delay_ms": 1_800_000, "fields": {"k": "ann", "what": "remind"}}],
        [{"name": "remind", "delay_ms": None, "fields": {}}],
    ]
    assert [one["timers"] != one["new"]["timers"] for one in found] == [one["differs"] for one in found]


def test_a_state_that_differs_in_the_order_of_its_names_only_is_no_difference(replays: Replays) -> None:
    add(replays.client, "1-1")
    old = replays.app(APP.replace("    return {", '    state.update(a=1, b=2)\n    return {"x": 1, '))
    new = replays.app(APP.replace("    return {", '    state.update(b=2, a=1)\n    return {"x": 1, '))
    assert replays(old, "total", "ann", "--new", new).code == 0
    assert replays(old, "total", "ann", "--new", replays.app()).code == 1


def test_versions_with_modules_of_the_same_names_are_compared(replays: Replays, tmp_path: Path) -> None:
    add(replays.client, "1-1")
    for folder, value in (("old", "1"), ("new", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "amounts.py").write_text(f"VALUE = {value}\n")
        text = APP.replace("import os", "import amounts, os").replace('int(message.fields["n"])', "amounts.VALUE")
        (tmp_path / folder / "billing.py").write_text(text)
    old, new = (str(tmp_path / folder / "billing.py:app") for folder in ("old", "new"))
    shown = run("replay", old, "total", "ann", "--new", new, "--yes", "--json", url=replays.client.url)
    assert shown.code == 1, shown.err
    (message,) = (one for one in shown.json_lines() if one["event"] == "message")
    assert (message["state"], message["new"]["state"]) == ({"n": 1}, {"n": 2})


def test_a_replay_may_begin_with_a_state_at_an_id_and_end_at_one(replays: Replays, tmp_path: Path) -> None:
    for n in range(1, 6):
        add(replays.client, f"{n}-1", n=n)
    file = tmp_path / "state.json"
    file.write_text('{"n": 100, "raw": {"hex": "ff"}}')
    app = replays.app()
    found = replays.lines(app, "total", "ann", "--from", "2-0", "--until", "4", "--state", str(file))
    assert [(one["id"], one["state"]["n"]) for one in found] == [("2-1", 102), ("3-1", 105), ("4-1", 109)]
    assert found[0]["state"]["raw"] == {"hex": "ff"}
    shown = replays(app, "total", "ann", "--from", "3-0")
    assert "; the replay begins at 3-0" in shown.err
    for content, error in (("[]", "a state is a JSON object"), ("{", "not a state in JSON"), ("", "not a state")):
        file.write_text(content)
        refused = replays(app, "total", "ann", "--state", str(file))
        assert refused.code == 2
        assert error in refused.err


def test_a_state_of_the_old_version_is_upcast_for_the_new_one(replays: Replays, tmp_path: Path) -> None:
    add(replays.client, "1-1", n=1)
    file = tmp_path / "state.json"
    file.write_text('{"n": 100}')
    newer = APP.replace('into="out",', 'into="out", state_upcasts=[lambda state: {"count": state["n"]}],')
    newer = newer.replace('state["n"] = state.get("n", 0)', 'state["count"] = state["count"]')
    newer = newer.replace('{"n": state["n"]}', '{"n": state["count"]}')
    shown = replays(replays.app(), "total", "ann", "--new", replays.app(newer), "--state", str(file), "--json")
    (message,) = (one for one in shown.json_lines() if one["event"] == "message")
    assert (message["state"], message["new"]["state"]) == ({"n": 101}, {"count": 101})


def test_a_replay_says_what_was_trimmed_or_deleted_before(replays: Replays) -> None:
    for n in range(1, 6):
        add(replays.client, f"{n}-1")
    replays.client.execute("XTRIM", "in", "MINID", "3-0")
    app = replays.app()
    assert "in is kept from 3-1 on; 2 entries before it were trimmed" in replays(app, "total", "ann").err
    start = replays(app, "total", "ann", "--json").json_lines()[0]
    assert start == {
        "event": "stream",
        "stream": "in",
        "first_id": "3-1",
        "last_id": "5-1",
        "entries": 3,
        "removed": 2,
        "only_trimmed": True,
    }
    replays.client.execute("XDEL", "in", "4-1")
    assert "3 entries were trimmed or deleted" in replays(app, "total", "ann").err


def test_a_history_longer_than_a_page_is_read_to_its_end(replays: Replays) -> None:
    pipeline = [("XADD", "in", f"{n}-1", "k", "ann" if n % 1_000 == 0 else "bob", "n", 1) for n in range(1, 3_001)]
    replays.client.pipeline(pipeline)
    found = replays.lines(replays.app(), "total", "ann")
    assert [(one["id"], one["state"]["n"]) for one in found] == [("1000-1", 1), ("2000-1", 2), ("3000-1", 3)]


def test_redriven_entries_are_replayed_for_the_handler_that_they_are_for(replays: Replays) -> None:
    for n, label in enumerate(("app.total", "app.other"), 1):
        replays.client.execute("XADD", "in", f"{n}-1", REDRIVE_FIELD, label, "k", "ann", "n", 5)
    found = replays.lines(replays.app(), "total", "ann")
    assert [(one["id"], one["state"]) for one in found] == [("1-1", {"n": 5})]


def test_each_stream_of_a_pattern_has_a_state_of_its_own(replays: Replays) -> None:
    for n, stream in enumerate(("in.a", "in.b", "in.a", "elsewhere"), 1):
        add(replays.client, f"{n}-1", stream=stream)
    app = replays.app(APP.replace('"in", key', 'pattern="in.*", key'))
    found = replays.lines(app, "total", "ann")
    assert [(one["stream"], one["id"], one["state"]["n"]) for one in found] == [
        ("in.a", "1-1", 1),
        ("in.a", "3-1", 2),
        ("in.b", "2-1", 1),
    ]
    assert [one["stream"] for one in replays.lines(app, "total", "ann", "--stream", "in.b")] == ["in.b"]
    refused = replays(app, "total", "ann", "--stream", "elsewhere")
    assert (refused.code, "does not read 'elsewhere'" in refused.err) == (1, True)


def test_a_state_is_for_one_stream(replays: Replays, tmp_path: Path) -> None:
    for stream in ("in.a", "in.b"):
        add(replays.client, "1-1", stream=stream)
    file = tmp_path / "state.json"
    file.write_text('{"n": 7}')
    app = replays.app(APP.replace('"in", key', 'pattern="in.*", key'))
    refused = replays(app, "total", "ann", "--state", str(file))
    assert (refused.code, "add --stream" in refused.err) == (2, True)
    (found,) = replays.lines(app, "total", "ann", "--state", str(file), "--stream", "in.a")
    assert found["state"] == {"n": 8}


def test_the_history_of_a_key_goes_through_the_partitions_that_owned_it(replays: Replays) -> None:
    keys = [f"key{n}" for n in range(40)]
    with PartitionedProducer(replays.client, "in", key="k", partitions=2) as producer:
        for n in (1, 2):
            producer.publish_many([{"k": key, "n": n} for key in keys])
        Partitions(replays.client, "in").grow(5)
        producer.publish_many([{"k": key, "n": 3} for key in keys])
    layout = Partitions(replays.client, "in").require()
    moved = next(key for key in keys if len(layout.owners(key.encode())) == 2)
    old, owner = (layout.stream(one) for one in layout.owners(moved.encode()))
    add(replays.client, "*", moved, stream=old, n=100)  # by hand, where the key is not any more
    app = replays.app(APP.replace('"in", key="k"', '"in", key="k", partitions=2'))
    found = replays.lines(app, "total", moved)
    assert [(one["stream"], one["state"]["n"]) for one in found] == [(old, 1), (old, 3), (owner, 6)]
    assert replays.lines(app, "total", moved, "--stream", "in") == found


def test_the_key_of_a_handler_of_whole_streams_is_the_stream(replays: Replays) -> None:
    for n, stream in enumerate(("in.a", "in.b", "in.a"), 1):
        add(replays.client, f"{n}-1", stream=stream)
    app = replays.app(APP.replace('"in", key="k"', 'pattern="in.*", order="stream"'))
    found = replays.lines(app, "total", "in.a")
    assert [(one["id"], one["state"]["n"]) for one in found] == [("1-1", 1), ("3-1", 2)]
    refused = replays(app, "total", "ann")
    assert (refused.code, "its key is the name of a stream" in refused.err) == (1, True)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_handler_of_lists_is_replayed_message_by_message(replays: Replays, kind: str) -> None:
    app = replays.app(f"""
from millstream import App, Message, State
app = App("app")

@app.handler("in", key="k", into="out", batch_size=10)
{kind} total(messages: list[Message], state: State) -> dict:
    state["n"] = state.get("n", 0) + len(messages)
    return {{"n": state["n"]}}
""")
    for n in range(1, 4):
        add(replays.client, f"{n}-1")
    assert [one["state"] for one in replays.lines(app, "total", "ann")] == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_an_async_handler_keeps_its_event_loop_and_its_time_limit(replays: Replays) -> None:
    app = replays.app("""
import asyncio
from millstream import App, Message, Retry
app = App("app")
loops = set()

@app.handler("in", key="k", into="out", time_limit_ms=200, retry=Retry(attempts=3))
async def total(message: Message) -> dict:
    loops.add(asyncio.get_running_loop())
    await asyncio.sleep(3600 if message.text("what") == "hang" else 0)
    return {"loops": len(loops)}
""")
    for n, what in enumerate(("", "hang", ""), 1):
        add(replays.client, f"{n}-1", what=what)
    found = replays.lines(app, "total", "ann")
    # An attempt on the others may exceed the limit as well, if its process stands still: the next one does not.
    assert [(one["result"], one["reason"]) for one in found] == [
        ("done", None),
        ("dead-letter", "failed"),
        ("done", None),
    ]
    assert found[1]["attempts"] == 3
    assert "longer than its time limit of 200 ms" in found[1]["error"]
    assert found[2]["outputs"] == [{"fields": {"loops": "1"}}]
    assert found[0]["state"] is None


def test_a_plain_handler_that_hangs_or_ends_its_process_becomes_a_dead_letter(replays: Replays) -> None:
    body = """
    if what == "hang":
        time.sleep(3600)
    if what == "end":
        os._exit(7)
"""
    text = APP.replace('    if what == "reject"', f'{body}    if what == "reject"')
    # A second attempt, as any message exceeds the limit if its process stands still.
    app = replays.app(text.replace('into="out"', 'into="out", time_limit_ms=1_000').replace("attempts=3", "attempts=2"))
    for n, what in enumerate(("", "hang", "end", ""), 1):
        add(replays.client, f"{n}-1", what=what)
    found = replays.lines(app, "total", "ann")
    assert [(one["result"], one["reason"], one["state"]["n"]) for one in found] == [
        ("done", None, 1),
        ("dead-letter", "failed", 1),
        ("dead-letter", "crashed", 1),
        ("done", None, 2),
    ]
    assert "time limit" in found[1]["error"]
    assert (
        found[2]["error"]
        == "2 processes crashed while they ran this message and nothing else; the last ended with code 7"
    )


@pytest.mark.parametrize(("then", "result"), [("park", "parked"), ("block", "blocked")])
def test_after_a_message_that_would_stop_its_key_the_replay_goes_on(replays: Replays, then: str, result: str) -> None:
    for n, what in enumerate(("", "fail", ""), 1):
        add(replays.client, f"{n}-1", what=what)
    app = replays.app(APP.replace("attempts=3", f'then="{then}", attempts=3'))
    found = replays.lines(app, "total", "ann")
    assert [(one["result"], one["attempts"], one["state"]["n"]) for one in found] == [
        ("done", 1, 1),
        (result, 3, 1),
        ("done", 1, 2),
    ]


def test_a_message_that_the_new_version_gives_another_key_differs_and_is_not_run(replays: Replays) -> None:
    add(replays.client, "1-1", other="bob")
    new = replays.app(APP.replace('key="k"', 'key="other"'))
    (found,) = replays.lines(replays.app(), "total", "ann", "--new", new)
    assert (found["result"], found["new"]["result"], found["new"]["state"], found["differs"]) == (
        "done",
        "other-key",
        {},
        True,
    )


def test_what_cannot_be_replayed_is_refused_in_one_line(replays: Replays, tmp_path: Path) -> None:
    add(replays.client, "1-1")
    app = replays.app(APP + '\n@app.handler("in")\ndef plain(message: Message) -> None: ...\n')
    for args, code, error in (
        ((app, "totl", "ann"), 2, "has no handler or stage 'totl'"),
        ((app, "plain", "ann"), 2, "has no key"),
        ((app, "total", "nobody"), 1, "no message of app.total with the key 'nobody'"),
        ((app, "total", "ann", "--new", "missing.py"), 2, "does not exist"),
        ((app, "total", "ann", "--from", "yesterday"), 2, "is not a time"),
        ((app, "total", "ann", "--state", str(tmp_path / "none.json")), 2, "cannot read"),
    ):
        refused = replays(*args)
        assert (refused.code, error in refused.err.splitlines()[-1]) == (code, True), refused.err
    asked = call("replay", app, "total", "ann", "--url", replays.client.url)
    assert (asked.code, "--yes" in asked.err) == (2, True)
    ends = replays.app(f"import os\nos._exit(3)\n{APP}")
    refused = replays(app, "total", "ann", "--new", ends)
    assert (refused.code, "its process ended with code 3 at its start" in refused.err) == (2, True)


def test_a_terminal_shows_the_progress(replays: Replays) -> None:
    add(replays.client, "1-1")
    shown = in_a_terminal("replay", replays.app(), "total", "ann", "--yes", url=replays.client.url)
    assert shown.code == 0
    assert "1 of 1 entries read, 1 message of the key" in shown.out


def test_ctrl_c_ends_a_replay_and_its_processes(replays: Replays) -> None:
    app = replays.app(APP.replace("    what =", '    print("running", flush=True)\n    time.sleep(3600)\n    what ='))
    add(replays.client, "1-1")
    shown = in_a_terminal("replay", app, "total", "ann", "--yes", url=replays.client.url, until=b"running")
    assert shown.code == 130
    assert "running" in shown.out
