"""`millstream worker --once`: it ends when nothing is left to do, and not before."""

import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from millstream import App, Message
from millstream.admin.draining import DrainWatch
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.reliable_stream import ReliableStream
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from tests.support.commandline import call, ended, start
from tests.support.processes import descendants
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker]

APP = """
import time
from millstream import App, Message, Retry, State

app = App("shop")

@app.handler("orders", key="k", into="totals", retry=Retry(attempts=4, delay_ms=300, then="park"))
def total(message: Message, state: State) -> dict[str, object]:
    if message.fields["k"] == b"bad":
        raise RuntimeError("gateway says no")
    if message.attempt == 1 and message.fields["n"].endswith(b"7"):
        raise RuntimeError("not yet")
    time.sleep({sleep_s})
    return {{"k": message.fields["k"], "n": message.fields["n"]}}

@app.handler("totals", into="done")
def note(message: Message) -> dict[str, object]:
    return dict(message.fields)
"""
COUNT = 200


def publish(client: Client, keys: int = 10) -> None:
    client.pipeline([("XADD", "orders", "*", "k", n % keys, "n", n) for n in range(COUNT)])


def done(client: Client) -> list[int]:
    """The numbers of the messages that both handlers have processed."""
    return sorted(
        int(dict(zip(pairs[::2], pairs[1::2], strict=True))[b"n"])
        for _, pairs in client.execute("XRANGE", "done", "-", "+")
    )


def handler(stream: str) -> Handler:
    """A handler of a stream, named like it."""
    app = App("app")

    @app.handler(stream, name=stream)
    def handle(message: Message) -> None:
        """Do nothing."""

    return app.handlers[stream]


@pytest.fixture
def once(client: Client, tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts `millstream worker --once`."""

    def run(sleep_s: float = 0.0, *options: str) -> subprocess.Popen[bytes]:
        (tmp_path / "once_app.py").write_text(APP.format(sleep_s=sleep_s))
        return start("worker", str(tmp_path / "once_app.py"), "--once", "--name", "w", *options, url=client.url)

    return run


def test_it_ends_when_all_messages_and_what_follows_from_them_are_processed(
    client: Client, once: Callable[..., subprocess.Popen[bytes]]
) -> None:
    publish(client)
    client.pipeline([("XADD", "orders", "*", "k", "bad", "n", 1_000 + n) for n in range(3)])
    call("publish", "orders", "k=later", "n=5000", "--in", "1h", url=client.url)
    outcome = ended(once())
    assert outcome.code == 0, outcome.err
    assert done(client) == list(range(COUNT))
    (parked,) = call("key", "list", "shop.total", "--json", url=client.url).json_lines()
    assert (parked["key"], parked["messages"]) == ("bad", 3)


def test_it_ends_at_once_where_nothing_is_to_be_done(
    client: Client, once: Callable[..., subprocess.Popen[bytes]]
) -> None:
    outcome = ended(once())
    assert (outcome.code, done(client)) == (0, [])


def test_killed_processes_do_not_make_it_end_early(
    client: Client, once: Callable[..., subprocess.Popen[bytes]]
) -> None:
    publish(client, keys=40)
    process = once(0.02, "--claim", "2s", "--processes", "2")
    for wanted in (20, 60, 100):
        eventually(lambda: client.execute("XLEN", "done") >= wanted or process.poll() is not None, "progress")  # noqa: B023 - at once
        for child in descendants(process)[:1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert done(client) == list(range(COUNT))


def test_a_paused_handler_ends_it_with_an_error_that_names_it(
    client: Client, once: Callable[..., subprocess.Popen[bytes]]
) -> None:
    publish(client)
    CommitStore(client, app="shop", handler="total").set_paused(["orders"], paused=True)
    outcome = ended(once())
    assert outcome.code == 1
    assert "error: not all is processed: shop.total is paused; to go on: millstream resume shop.total" in outcome.err


def test_a_handler_of_announced_streams_is_refused(client: Client, tmp_path: Path) -> None:
    (tmp_path / "announced_once_app.py").write_text(
        "from millstream import App, Message\napp = App('a')\n"
        "@app.handler(announced='calls', order='stream')\ndef handle(message: Message) -> None: ...\n"
    )
    refused = call("worker", str(tmp_path / "announced_once_app.py"), "--once", url=client.url)
    assert refused.code == 2
    assert "handler 'handle' reads announced streams, of which more may come" in refused.err


def test_messages_of_a_handler_that_no_worker_has_joined_yet_are_to_be_done(client: Client) -> None:
    watch = DrainWatch(client, [handler("a"), handler("b")])
    assert [watch.check(), watch.check()] == [False, True]
    client.execute("XADD", "a", "*", "n", 1)
    assert [watch.check(), watch.check()] == [False, False]


def test_a_nacked_message_is_to_be_done(client: Client) -> None:
    stream = ReliableStream(client, "a", app="app", handler="a", consumer="w")
    stream.join()
    watch = DrainWatch(client, [handler("a")])
    client.execute("XADD", "a", "*", "n", 1)
    (pending,) = stream.fetch(count=1)
    stream.nack([pending.id])
    assert [watch.check(), watch.check()] == [False, False]
    client.execute("XGROUP", "DELCONSUMER", "a", stream.group, "waiting")  # which acknowledges it
    assert [watch.check(), watch.check()] == [False, True]


def test_a_message_that_passes_between_two_looks_is_noticed(client: Client) -> None:
    streams = {name: ReliableStream(client, name, app="app", handler=name, consumer="w") for name in ("a", "b")}
    for stream in streams.values():
        stream.join()
    watch = DrainWatch(client, [handler("a"), handler("b")])
    assert not watch.check()
    for stream in streams.values():  # a message comes, and is processed, between two looks
        client.execute("XADD", stream.stream, "*", "n", 1)
        assert stream.ack(*stream.fetch(count=1)) == []
        assert not watch.check()
    assert watch.check()
    client.execute("XADD", "a", "*", "n", 2)
    (pending,) = streams["a"].fetch(count=1)
    assert [watch.check(), watch.check()] == [False, False]
    assert streams["a"].ack(pending) == []
    assert [watch.check(), watch.check()] == [False, True]
