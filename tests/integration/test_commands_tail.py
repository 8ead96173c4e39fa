"""`millstream tail`."""

import json
import re
import signal
import subprocess

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.commandline import Outcome, call, ended, running
from tests.support.json_reference import check_events
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli]


def fill(client: Client, stream: str, count: int) -> None:
    """Add entries 1-1, 2-1, 3-1, ... with their number."""
    client.pipeline([("XADD", stream, f"{number}-1", "n", number) for number in range(1, count + 1)])


def numbers(*args: str, url: str) -> list[int]:
    """The numbers of the entries that `tail ARGS --no-follow` shows."""
    shown = call("tail", *args, "--no-follow", "--json", url=url)
    assert shown.code == 0
    return [int(entry["fields"]["n"]) for entry in shown.json_lines()]


def lines(process: subprocess.Popen[bytes], count: int) -> list[dict[str, object]]:
    """The next lines that a running `tail --json` prints."""
    assert process.stdout is not None
    return [json.loads(process.stdout.readline()) for _ in range(count)]


def test_tail_shows_a_whole_stream_in_order_and_ends(client: Client) -> None:
    fill(client, "s", 1_700)
    assert numbers("s", url=client.url) == list(range(1, 1_701))


@pytest.mark.parametrize(
    ("where", "first"),
    [("earliest", 1), ("3-1", 3), ("3-0", 3), ("3-2", 4), ("4", 4), ("0", 1), ("1970-01-01T00:00:00.005", 5)],
)
def test_tail_begins_at_the_given_place(client: Client, where: str, first: int) -> None:
    fill(client, "s", 6)
    assert numbers("s", "--from", where, url=client.url) == list(range(first, 7))


def test_tail_ends_after_the_limit_of_entries(client: Client) -> None:
    fill(client, "s", 600)
    assert numbers("s", "--limit", "2", url=client.url) == [1, 2]
    assert numbers("s", "--limit", "501", url=client.url) == list(range(1, 502))
    followed = call("tail", "s", "--from", "earliest", "--limit", "600", url=client.url)
    assert followed.out.count("\n") == 600


def test_tail_shows_several_streams_beside_a_missing_one(client: Client) -> None:
    fill(client, "a", 2)
    fill(client, "b", 3)
    shown = call("tail", "a", "b", "none", "a", "--no-follow", "--json", url=client.url)
    assert shown.code == 1
    assert [(entry["stream"], entry["id"]) for entry in shown.json_lines()] == [
        *(("a", "1-1"), ("a", "2-1")),
        *(("b", "1-1"), ("b", "2-1"), ("b", "3-1")),
    ]


def test_tail_reports_missing_streams_and_patterns(client: Client) -> None:
    fill(client, "a", 1)
    fill(client, "emptied", 1)
    client.execute("XTRIM", "emptied", "MAXLEN", 0)
    shown = call("tail", "none", "a", "emptied", "x:*", "--no-follow", url=client.url)
    assert shown.code == 1
    assert shown.out.count("\n") == 1
    assert shown.err.splitlines() == [
        "no stream matches x:*",
        "emptied: the stream is empty",
        "error: no such stream: none; `millstream info` lists those that exist, and without --no-follow it waits for them",
    ]


def test_tail_of_an_empty_stream_or_of_a_pattern_that_matches_none_is_no_error(client: Client) -> None:
    fill(client, "emptied", 1)
    client.execute("XTRIM", "emptied", "MAXLEN", 0)
    assert call("tail", "emptied", "x:*", "--no-follow", url=client.url).code == 0


@pytest.mark.parametrize("streams", [["a", "b"], ["a", "none"], ["a", "b*"], ["[ab]"]])
def test_tail_shows_entries_that_are_added_after_it_reports_that_it_follows(client: Client, streams: list[str]) -> None:
    fill(client, "a", 3)
    fill(client, "b", 3)
    with running("tail", *streams, "--json", url=client.url) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"following 2 streams")
        client.execute("XADD", "a", "*", "n", 4)
        assert [entry["fields"] for entry in lines(process, 1)] == [{"n": "4"}]


def test_tail_ends_where_the_last_entries_were_deleted(client: Client) -> None:
    fill(client, "s", 3)
    client.execute("XDEL", "s", "3-1", "2-1")
    assert numbers("s", url=client.url) == [1]
    client.execute("XDEL", "s", "1-1")
    assert numbers("s", url=client.url) == []


def test_tail_reports_a_key_that_cannot_be_a_stream(client: Client) -> None:
    client.execute("SET", "text", "x")
    shown = call("tail", "text", "--no-follow", url=client.url)
    assert shown.code == 1
    assert shown.err == "error: text is not a stream: rename or delete that key\n"
    assert "text is not a stream: rename or delete that key" in call("tail", "text", url=client.url).err
    assert call("tail", "s", "--from", "yesterday", url=client.url).code == 2


def test_tail_escapes_bytes_that_could_harm_a_terminal(client: Client) -> None:
    nasty = b"\x1b]0;owned\x07\x9b31m\r\n\xff\xe2\x80\xae"
    client.execute("XADD", "s", "5-0", nasty, nasty)
    shown = call("tail", "s", "--no-follow", url=client.url)
    escaped = r"\x1b]0;owned\x07\x9b31m\r\n\xff\xe2\x80\xae"
    assert shown.out == f"1970-01-01T00:00:00.005Z  s  5-0  {escaped}={escaped}\n"
    assert call("tail", "s", "--no-follow", "--json", url=client.url).out.isascii()


def test_tail_prints_exact_json_for_any_fields(client: Client) -> None:
    client.execute("XADD", "s", "5-0", "a", b"\xff\x00", "a", "é", b"\xfe", "x")
    (entry,) = call("tail", "s", "--no-follow", "--json", url=client.url).json_lines()
    assert entry == {
        "stream": "s",
        "id": "5-0",
        "time": "1970-01-01T00:00:00.005Z",
        "fields": {"a": "é", "\\xfe": "x"},
        "pairs": [["a", {"hex": "ff00"}], ["a", "é"], [{"hex": "fe"}, "x"]],
    }


def test_tail_truncates_a_long_value_in_a_table_and_not_in_json(client: Client) -> None:
    client.execute("XADD", "s", "18446744073709551615-0", "a", "x" * 100_000)
    assert len(call("tail", "s", "--no-follow", url=client.url).out) < 400
    (entry,) = call("tail", "s", "--no-follow", "--json", url=client.url).json_lines()
    assert (entry["fields"], entry["time"]) == ({"a": "x" * 100_000}, None)


def test_tail_follows_from_the_end_and_shows_every_new_entry(client: Client) -> None:
    fill(client, "a", 5)
    with running("tail", "a", "b", "--json", url=client.url) as process:
        _until_it_waits(client)
        client.pipeline([("XADD", stream, "*", "n", number) for number in range(700) for stream in ("a", "b")])
        shown = lines(process, 1_400)
    for stream in ("a", "b"):
        fields = [entry["fields"] for entry in shown if entry["stream"] == stream]
        assert fields == [{"n": str(number)} for number in range(700)]


def test_tail_follows_again_after_redis_was_away(millstream_fresh_server: EmbeddedServer) -> None:
    with Client(millstream_fresh_server.url) as client:
        fill(client, "s", 3)
        with running("tail", "s", "--from", "2", "--json", url=client.url) as process:
            assert [entry["id"] for entry in lines(process, 2)] == ["2-1", "3-1"]
            millstream_fresh_server.kill()
            assert process.stderr is not None
            assert any(b"Redis unreachable for" in line for line in process.stderr)
            millstream_fresh_server.start()
            client.retry_while_unavailable(lambda: client.execute("XADD", "s", "4-1", "n", 4), what="the test")
            assert [entry["id"] for entry in lines(process, 1)] == ["4-1"]


def test_tail_follows_the_streams_of_a_pattern_and_those_created_later_until_ctrl_c(client: Client) -> None:
    fill(client, "a:1", 3)
    fill(client, "b:1", 3)
    with running("tail", "a:*", "--json", url=client.url) as process:
        _until_it_waits(client)
        client.execute("XADD", "a:1", "*", "n", 4)
        client.execute("XADD", "b:1", "*", "n", 4)
        fill(client, "a:2", 2)
        shown = lines(process, 3)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    found = sorted((str(entry["stream"]), str(entry["fields"])) for entry in shown)
    assert found == [("a:1", "{'n': '4'}"), ("a:2", "{'n': '1'}"), ("a:2", "{'n': '2'}")]
    output = "following 1 stream, and new ones that match a:*; Ctrl-C ends it\n"
    assert outcome == Outcome(code=130, out="", err=output)


def test_tail_shows_a_thousand_streams_of_a_pattern_from_after_an_id(client: Client) -> None:
    streams = [f"s:{number}" for number in range(1_000)]
    client.pipeline([("XADD", stream, entry, "n", 1) for stream in streams for entry in ("1-1", "2-1", "3-1")])
    shown = call("tail", "s:*", "--after", "1-1", "--limit", "2000", "--json", url=client.url).json_lines()
    for stream in streams:
        assert [entry["id"] for entry in shown if entry["stream"] == stream] == ["2-1", "3-1"]
    fill(client, "other", 3)
    assert numbers("s:1*", "other", "--after", "2-1", url=client.url) == [3] + [1] * 111


def test_tail_from_a_time_that_a_stream_does_not_reach_shows_the_entries_after_it(client: Client) -> None:
    fill(client, "old", 3)
    with running("tail", "old", "none", "--from", "1h", "--json", url=client.url) as process:
        _until_it_waits(client)
        client.pipeline([("XADD", stream, "*", "n", 4) for stream in ("old", "none")])
        shown = lines(process, 2)
    assert sorted(str(entry["stream"]) for entry in shown) == ["none", "old"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_tail_reports_a_gap_at_its_position(client: Client, form: tuple[str, ...]) -> None:
    fill(client, "s", 5)
    with running("tail", "s*", "--from", "5", *form, url=client.url) as process:
        assert process.stdout is not None
        process.stdout.readline()
        client.pipeline([("DEL", "s"), ("XADD", "s", "1-1", "n", "new")])
        shown = [process.stdout.readline() for _ in range(2 if form else 1)]
        process.kill()
        err = ended(process).err
    assert b"1-1" in shown[-1]
    if form:
        check_events("tail", [json.loads(shown[0])])
        assert json.loads(shown[0]) == {
            "event": "gap",
            "stream": "s",
            "after": "5-1",
            "reason": "recreated",
            "missed": None,
        }
    else:
        assert "s: the stream was deleted and created again, after 5-1\n" in err


def test_tail_skips_a_stream_of_a_pattern_that_becomes_another_type(client: Client) -> None:
    fill(client, "s:1", 1)
    fill(client, "s:2", 1)
    with running("tail", "s:*", "--json", url=client.url) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"following 2 streams, ")
        _until_it_waits(client)
        client.execute("SET", "s:1", "text")
        assert b"tail skips the stream s:1: s:1 is not a stream" in process.stderr.readline()
        client.execute("XADD", "s:2", "*", "n", 2)
        client.execute("DEL", "s:1")
        assert lines(process, 1)[0]["stream"] == "s:2"
        client.execute("XADD", "s:1", "*", "n", 2)
        assert lines(process, 1)[0]["stream"] == "s:1"


def test_tail_names_a_stream_of_a_pattern_that_may_not_be_read_and_does_not_count_it(client: Client) -> None:
    for name in ("s:1", "s:2", "s:3"):
        fill(client, name, 1)
    client.execute("ACL", "SETUSER", "some", "reset", "on", ">secret", "+@all", "~s:1", "~s:2")
    try:
        with running("tail", "s:*", "--json", url=client.url.replace("redis://", "redis://some:secret@")) as process:
            assert process.stderr is not None
            output = [process.stderr.readline() for _ in range(2)]
            client.execute("XADD", "s:2", "*", "n", 2)
            assert lines(process, 1)[0]["stream"] == "s:2"
    finally:
        client.execute("ACL", "DELUSER", "some")
    assert output[0].partition(b" ")[2].startswith(b"WARNING tail skips the stream s:3: the Redis user may not do ")
    assert output[1].startswith(b"following 2 streams, ")


def _until_it_waits(client: Client) -> None:
    """Until it has read once: what is added then has to be shown."""
    reads = re.compile(rb" name=millstream-router .* cmd=(xread|xinfo)")
    eventually(lambda: reads.search(client.execute("CLIENT", "LIST")), "tail to have read")
