"""The commands on a Redis Cluster, behind Sentinel, over TLS and as a user with few rights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.testing.topologies import acl_server, cluster, tls_server
from tests.support.commandline import call
from tests.support.replicas import steady_trio

pytestmark = [pytest.mark.cli]

STREAMS = [f"stream-{number}" for number in range(8)]


@contextmanager
def deployment(kind: str) -> Iterator[str]:
    """The URL of a deployment."""
    if kind == "cluster":
        with cluster() as nodes:
            yield nodes.url
    elif kind == "sentinel":
        with steady_trio() as trio:
            yield trio.url
    else:
        with tls_server() as server:
            yield server.url


@pytest.mark.parametrize("kind", ["cluster", "sentinel", "tls"])
def test_every_command_works_on_every_deployment(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> None:
    if kind == "tls":
        request.getfixturevalue("tls")
    path = tmp_path / "some.csv"
    path.write_text("n\n1\n2\n3\n")
    with deployment(kind) as url:
        for stream in STREAMS:
            assert call("publish", stream, str(path), url=url).code == 0
        _have_letters(url)

        shown = call("tail", *STREAMS, "--from", "earliest", "--limit", "24", "--json", url=url)
        assert shown.code == 0, shown.err
        for stream in STREAMS:
            assert [e["fields"] for e in shown.json_lines() if e["stream"] == stream] == [{"n": n} for n in "123"]

        info = call("info", "app", "--json", url=url).json()
        assert {stream["name"]: stream["length"] for stream in info["streams"]} == dict.fromkeys(STREAMS, 3)
        assert [(handler["lag"], handler["dead_letters"]) for handler in info["handlers"]] == [(3, 1)] * len(STREAMS)

        assert len(call("dlq", "list", "--json", url=url).json_lines()) == len(STREAMS)
        back = call("dlq", "redrive", "--all", "--yes", "--json", url=url)
        assert (back.code, back.json()["redriven"]) == (0, len(STREAMS)), back.err
        with Client(url) as client:
            assert [client.execute("XLEN", stream) for stream in STREAMS] == [4] * len(STREAMS)

        assert call("key", "list", url=url).err == "there are no such keys\n"
        assert len(call("group", "list", "--pattern", "*", "--json", url=url).json_lines()) == len(STREAMS)
        assert call("state", "show", "app.handler", "--stream", STREAMS[0], "k", "--json", url=url).json() == {}
        assert call("state", "reset", "app.handler", "--stream", STREAMS[0], "k", "--yes", url=url).code == 0


def test_the_error_names_a_command_that_a_user_may_not_run(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("n\n1\n")
    with acl_server(["reader >secret ~orders* +@read +@connection"]) as server:
        url = server.urls["reader"]
        refused = call("publish", "orders", str(path), url=url)
        assert refused.code == 3
        assert "the Redis user may not do" in refused.err
        allowed = call("tail", "orders", "--no-follow", url=url)
        assert (allowed.code, allowed.err.startswith("error: no such stream: orders; ")) == (1, True)
        assert call("tail", "others", "--no-follow", url=url).code == 3


def _have_letters(url: str) -> None:
    with Client(url) as client:
        for stream in STREAMS:
            keys = HandlerKeys("app", "handler", stream)
            letter = DeadLetter(
                stream=stream,
                id="1-0",
                pairs=[b"n", b"0"],
                key=None,
                app=keys.app,
                handler=keys.handler,
                attempts=1,
                reason="rejected",
                error="no",
                time_ms=0,
            )
            client.execute("XADD", keys.dead_letters, "*", *letter.items())
            client.execute("XGROUP", "CREATE", stream, keys.group, "0")
            client.execute("HSET", keys.meta, "epoch", "1")
            client.execute("HSET", keys.state, "k", b"\x80")
