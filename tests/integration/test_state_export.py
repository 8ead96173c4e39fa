"""All states of a handler, as JSON lines and as the pages that Spark reads: each key, in bounded memory."""

import json
from collections.abc import Iterator
from contextlib import suppress

import pytest

from millstream.admin import state_scan
from millstream.admin.state_scan import scan_states, state_hashes
from millstream.delivery.commit_store import FORMAT
from millstream.errors import MillstreamError, Unavailable
from millstream.handlers.upcasting import encode_state
from millstream.model import State
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from millstream.testing.topologies import cluster
from tests.support.command_stats import commands_run
from tests.support.commandline import call

pytestmark = [pytest.mark.cli]


def keys_on(stream: str) -> HandlerKeys:
    return HandlerKeys("shop", "total", stream)


def store(client: Client, stream: str, count: int, *, padding: int = 0) -> dict[bytes, int]:
    """Give keys of a stream states; return the number in each."""
    blobs = {b"key%d" % n: encode_state(State(n=n, pad=b"x" * padding)) for n in range(count)}
    client.pipeline([("HSET", keys_on(stream).state, key, blob) for key, blob in blobs.items()])
    return {key: n for n, key in enumerate(blobs)}


def pages(client: Client, *streams: str) -> Iterator[list[state_scan.StoredState]]:
    return scan_states(client, [one.keys for one in state_hashes(client, "shop", "total", streams)])


def test_export_prints_every_state_of_every_stream_of_the_handler_and_no_other(client: Client) -> None:
    expected = {(stream, key.decode(), n) for stream in ("a", "{b}.1") for key, n in store(client, stream, 700).items()}
    client.execute("HSET", HandlerKeys("shop", "totals", "a").state, "k", encode_state(State(n=1)))
    client.execute("HSET", HandlerKeys("shops", "total", "a").state, "k", encode_state(State(n=1)))
    client.execute("HSET", HandlerKeys("other", "h", "a:shop.total:meta").state, "k", encode_state(State(n=1)))
    client.execute("HSET", keys_on("a").meta, "committed_id", "1-1")
    client.execute("RPUSH", keys_on("a").queue(b"kstate"), "1-1")
    shown = call("state", "export", "shop.total", url=client.url)
    assert shown.code == 0
    found = [(one["stream"], one["key"], one["state"]["n"]) for one in shown.json_lines()]
    assert (len(found), set(found)) == (1_400, expected)
    assert call("state", "export", "shop.total", "--json", url=client.url).out == shown.out
    only = call("state", "export", "shop.total", "--stream", "a", url=client.url).json_lines()
    assert {one["stream"] for one in only} == {"a"}


def test_export_shows_bytes_damaged_states_and_when_a_state_expires(client: Client) -> None:
    keys = keys_on("a")
    client.execute("HSET", keys.state, b"\xff", encode_state(State(raw=b"\xfe")), "bad", b"\x01\x02")
    found = {json.dumps(one["key"]): one for one in call("state", "export", "shop.total", url=client.url).json_lines()}
    assert found['{"hex": "ff"}']["state"] == {"raw": {"hex": "fe"}}
    assert (found['"bad"']["state"], found['"bad"']["damaged"]) == (None, "0102")
    with suppress(MillstreamError):  # servers before Redis 7.4 have no expiry of fields
        client.execute("HPEXPIREAT", keys.state, 4_000_000_000_000, "FIELDS", 1, "bad")
        lines = call("state", "export", "shop.total", url=client.url).json_lines()
        assert [one.get("expires_ms") for one in lines if one["key"] == "bad"] == [4_000_000_000_000]


def test_commands_show_the_version_that_a_state_is_stored_in(client: Client) -> None:
    client.execute("HSET", keys_on("a").state, "new", encode_state(State(n=1), 3), "old", encode_state(State(n=2)))
    client.execute("XADD", "a", "1-1", "n", 1)
    client.execute("XGROUP", "CREATE", "a", keys_on("a").group, "0")
    listed = sorted(call("state", "export", "shop.total", url=client.url).json_lines(), key=lambda one: str(one["key"]))
    assert listed == [
        {"stream": "a", "key": "new", "state": {"n": 1}, "version": 3},
        {"stream": "a", "key": "old", "state": {"n": 2}},
    ]
    shown = call("state", "show", "shop.total", "new", url=client.url)
    assert (shown.json(), "stored in version 3" in shown.err) == ({"n": 1}, True)
    head, *rows = call("state", "list", "shop.total", url=client.url).out.splitlines()
    assert (head.split(), [row.split()[3] for row in rows]) == (["key", "size", "version", "state"], ["3", "1"])


def test_a_handler_that_has_not_run_and_one_of_a_newer_format_are_refused(client: Client) -> None:
    refused = call("state", "export", "shop.total", url=client.url)
    assert (refused.code, "no handler 'shop.total' has run on this Redis" in refused.err) == (1, True)
    assert call("state", "export", "shop", url=client.url).code == 2
    refused = call("state", "export", "shop.total", "--stream", "a", url=client.url)
    assert (refused.code, "no handler 'shop.total' has run on these streams" in refused.err) == (1, True)
    client.execute("HSET", keys_on("a").meta, "format", FORMAT + 1)
    refused = call("state", "export", "shop.total", url=client.url)
    assert (refused.code, "by a newer millstream" in refused.err) == (1, True)
    client.execute("HSET", keys_on("a").meta, "format", FORMAT)
    empty = call("state", "export", "shop.total", url=client.url)
    assert (empty.code, empty.out) == (0, "")
    assert call("state", "export", "shop.total", "--stream", "a", url=client.url).code == 0


def test_pages_have_a_bounded_number_of_bytes_and_many_streams_share_a_round_trip(client: Client) -> None:
    store(client, "big", 300, padding=100_000)
    sizes = [sum(len(one.blob) for one in page) for page in pages(client, "big")]
    assert sum(sizes) > 30_000_000
    assert max(sizes) < 4 * state_scan._PAGE_BYTES
    for n in range(200):
        store(client, f"small{n}", 3)
    before = commands_run(client.execute)
    streams = [f"small{n}" for n in range(200)]
    found = list(pages(client, *streams))
    assert {len({one.stream for one in page}) for page in found} == {64, 8}
    assert sum(map(len, found)) == 600
    assert (commands_run(client.execute) - before)["hscan"] == 200


def test_a_key_that_keeps_its_state_is_found_while_others_come_and_go(client: Client) -> None:
    kept = store(client, "a", 2_000)
    found: set[bytes] = set()
    for turn, page in enumerate(pages(client, "a")):
        found.update(one.key for one in page)
        client.pipeline([("HSET", keys_on("a").state, f"new{turn}.{n}", b"\x80") for n in range(500)])
        client.execute("HDEL", keys_on("a").state, *[f"new{turn - 1}.{n}" for n in range(500)])
    assert found >= kept.keys()


def test_a_scan_that_loses_its_connection_ends_with_an_error_instead_of_gaps(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    with Client(millstream_fresh_server.url) as client:
        store(client, "a", 2_000)
        reading = pages(client, "a")
        next(reading)
        client.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(Unavailable):
            list(reading)


def test_states_on_a_cluster_are_read_from_every_node() -> None:
    with cluster() as nodes, Client(nodes.url) as client:
        expected = {(stream, key) for stream in "abcdefgh" for key in store(client, stream, 100)}
        assert {(one.stream, one.key) for page in pages(client) for one in page} == expected
