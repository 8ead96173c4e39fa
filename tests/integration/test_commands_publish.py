"""`millstream publish` and the Publisher under it: what is published, how fast, and that it is so once."""

import itertools
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.clock import SYSTEM_CLOCK
from millstream.errors import OutOfMemory, OutputError, Unavailable, WrongType
from millstream.producer.bulk import Publisher, Value
from millstream.producer.session import BATCH_ENTRIES, MAX_FIELDS
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.formats import entry_rate
from tests.support.clocks import ManualClock
from tests.support.commandline import PROGRAM, call, ended, environment, run, running
from tests.support.memory import relieved_once_refused
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli]

ENDLESS_MS = 1e9


def entries(client: Client, stream: str = "s") -> list[list[bytes]]:
    """The names and values of all entries of a stream."""
    return [pairs for _, pairs in client.execute("XRANGE", stream, "-", "+")]


# --- Files ---


def test_a_csv_file_is_published_unchanged(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "flights.csv"
    path.write_bytes(
        b'\xef\xbb\xbfid,name,note\r\n1,NA,"a ""quoted"", text"\r\n2,,"two\nlines"\r\n\r\n3,\xff\xfe,\xc3\xa9\r\n'
    )
    done = call("publish", "s", str(path), "--null", "NA", url=client.url)
    assert done.code == 0
    assert entries(client) == [
        [b"id", b"1", b"note", b'a "quoted", text'],
        [b"id", b"2", b"name", b"", b"note", b"two\nlines"],
        [b"id", b"3", b"name", b"\xff\xfe", b"note", b"\xc3\xa9"],
    ]
    assert done.out.startswith(f"3 entries ({path.stat().st_size} bytes) published to s in ")


def test_only_the_named_null_values_are_left_out(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "some.CSV"
    path.write_text("a,b,c\n,NA,-\nx,y,é\n")
    call("publish", "s", str(path), url=client.url)
    call("publish", "t", str(path), "--null", "", "--null", "é", url=client.url)
    assert entries(client)[0] == [b"a", b"", b"b", b"NA", b"c", b"-"]
    assert entries(client, "t") == [[b"b", b"NA", b"c", b"-"], [b"a", b"x", b"b", b"y"]]


def test_json_lines_keep_numbers_and_nested_values_as_they_are_written(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(
        '{"a": 1.10, "b": 12345678901234567890, "c": null, "d": "NA", "e": ""}\n \n'
        '{"t": true, "n": {"x": [1, 2]}, "text": "\\u00e9\\n"}'
    )
    done = call("publish", "s", str(path), "--null", "NA", "--json", url=client.url)
    assert entries(client) == [
        [b"a", b"1.10", b"b", b"12345678901234567890", b"e", b""],
        [b"t", b"true", b"n", b'{"x": [1, 2]}', b"text", "é\n".encode()],
    ]
    figures = done.json()
    assert (figures["stream"], figures["entries"], figures["bytes"]) == ("s", 2, path.stat().st_size)
    assert figures["rate"] > 0


def test_standard_input_is_published_as_it_arrives(client: Client) -> None:
    with running("publish", "s", "--format", "csv", "--json", url=client.url, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"a,b\n1,2\n3,")
        process.stdin.flush()
        eventually(lambda: client.execute("XLEN", "s") == 1, "an entry, though nothing more comes")
        outcome = ended(process, b"4\n")
    assert outcome.json()["entries"] == 2
    assert entries(client) == [[b"a", b"1", b"b", b"2"], [b"a", b"3", b"b", b"4"]]


@pytest.mark.parametrize(
    ("name", "text", "complaint", "before"),
    [
        ("x.csv", "a,b\n1,2\n3\n", "line 3: 1 values, but the first line names 2 fields", 1),
        ("x.csv", 'a,b\n1,"x\ny"\n3,4,5\n', "line 4: 3 values", 1),
        ("x.csv", 'a,b\n1,2\n3,"x"y\n', "line 3: ", 1),
        ("x.csv", 'a,b\n1,2\n3,4\n5,"x\n', "line 4: unexpected end of data", 2),
        ("x.csv", "a,b\n1,2\nNA,NA\n", "line 3: every value is missing", 1),
        ("x.csv", "", "line 1: a CSV file must begin with a line of field names", 0),
        ("x.jsonl", '{"a":1}\n{"a":1\n', "line 2: not a JSON object", 1),
        ("x.jsonl", '{"a":1}\n\n[1]\n', "line 3: not a JSON object", 1),
        ("x.jsonl", '{"a":null}\n', "line 1: every value is missing", 0),
        ("x.ndjson", '{"a":"\\ud800"}\n', "line 1: ", 0),
    ],
)
def test_the_error_names_a_malformed_line_and_the_lines_before_it_are_published(
    client: Client, tmp_path: Path, name: str, text: str, complaint: str, before: int
) -> None:
    path = tmp_path / name
    path.write_text(text)
    done = call("publish", "s", str(path), "--null", "NA", url=client.url)
    assert done.code == 1
    assert f"error: {path}, {complaint}" in done.err
    assert f"{before} entr" in done.err
    assert client.execute("XLEN", "s") == before


def test_one_entry_is_published_from_fields_on_the_command_line(client: Client) -> None:
    done = call("publish", "s", "customer=ann", "amount=10", "url=http://a/b=c", "empty=", "raw=\udcff", url=client.url)
    assert done.code == 0
    expected = [b"customer", b"ann", b"amount", b"10", b"url", b"http://a/b=c", b"empty", b"", b"raw", b"\xff"]
    assert entries(client) == [expected]
    assert done.out.startswith(f"1 entry ({len(b''.join(expected))} bytes) published to s in ")
    assert call("publish", "s", "n=1", "--in", "1h", "--json", url=client.url).json()["delay_ms"] == 3_600_000
    assert len(entries(client)) == 1


def test_the_ids_of_the_published_entries_are_printed(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("n\n" + "1\n" * (2 * BATCH_ENTRIES + 1))

    def published(*words: str) -> tuple[list[str], str, dict[str, str | None]]:
        """The ids in the stream after a call, the end of its line, and the ids that it prints as JSON the next time."""
        client.execute("DEL", "s")
        line = call("publish", "s", *words, url=client.url).out.rstrip("\n")
        ids = [entry_id.decode() for entry_id, _ in client.execute("XRANGE", "s", "-", "+")]
        return ids, line.partition("/s")[2], call("publish", "s", *words, "--json", url=client.url).json()

    (only,), end, as_json = published("n=1")
    assert end == f"; id {only}"
    assert as_json["first_id"] == as_json["last_id"] == client.execute("XREVRANGE", "s", "+", "-")[0][0].decode()
    ids, end, as_json = published(str(path))
    assert end == f"; ids {ids[0]} to {ids[-1]}"
    stored = client.execute("XRANGE", "s", "-", "+")[len(ids) :]
    assert (as_json["first_id"], as_json["last_id"]) == (stored[0][0].decode(), stored[-1][0].decode())
    ids, end, as_json = published("n=1", "--in", "1h")
    assert (ids, end, as_json["first_id"], as_json["last_id"]) == ([], "", None, None)
    path.write_text("n\n")
    ids, end, as_json = published(str(path))
    assert (ids, end, as_json["first_id"], as_json["last_id"]) == ([], "", None, None)


@pytest.mark.parametrize(("per_s", "text"), [(0.4, "0 entries/s"), (1.4, "1 entry/s"), (1_234.0, "1,234 entries/s")])
def test_a_rate_has_its_noun_in_singular_or_plural(per_s: float, text: str) -> None:
    assert entry_rate(per_s) == text


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("a=1", "b"), "'b' is not a field: write NAME=VALUE"),
        (("a=1", "=2"), "'=2' is not a field"),
        (("=2",), "'=2' is not a field"),
        (("a=1", "a=2"), "'a=2': this name is given twice"),
        (("x.csv", "a=1"), "give one file, or fields as NAME=VALUE, not 'a=1'"),
        (("device", "a=1"), "give one file, or fields as NAME=VALUE, not 'device'"),
        (("a=1", "--null", "NA"), "--format and --null are for files"),
        (("./a=b.csv",), "cannot read './a=b.csv'"),
        (("device",), "'device' is neither NAME=VALUE nor a file that ends in .csv, .jsonl or .ndjson"),
    ],
)
def test_arguments_that_are_neither_a_file_nor_fields_are_wrong_usage(
    client: Client, args: tuple[str, ...], complaint: str
) -> None:
    done = call("publish", "s", *args, url=client.url)
    assert (done.code, client.execute("XLEN", "s")) == (2, 0)
    assert complaint in done.err


def test_a_file_that_cannot_be_read_is_wrong_usage(client: Client, tmp_path: Path) -> None:
    for file in (str(tmp_path / "none.csv"), str(tmp_path)):
        done = call("publish", "s", file, "--format", "csv", url=client.url)
        assert done.code == 2
        assert "cannot read" in done.err
    (tmp_path / "data.parquet").write_bytes(b"")
    done = call("publish", "s", str(tmp_path / "data.parquet"), url=client.url)
    assert done.code == 2
    assert "data.parquet': add --format csv or --format jsonl" in done.err


def test_publish_trims_the_stream_and_keeps_the_rate(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("a\n" + "1\n" * 3000)
    call("publish", "s", str(path), "--maxlen", "1000", url=client.url)
    assert 1000 <= client.execute("XLEN", "s") < 1200
    path.write_text("a\n" + "1\n" * 60)
    done = call("publish", "t", str(path), "--rate", "100", "--json", url=client.url)
    assert done.json()["entries"] == client.execute("XLEN", "t") == 60
    assert done.json()["seconds"] >= 0.5


def test_entries_are_published_evenly_at_a_rate_and_not_in_bursts(client: Client) -> None:
    class Sleeps(ManualClock):
        """A clock that records for how long a thread sleeps by it."""

        noted: ClassVar[list[float]] = []

        def sleep_ms(self, duration_ms: float) -> None:
            self.noted.append(duration_ms)
            super().sleep_ms(duration_ms)

    with Publisher(client, "s", rate=100, clock=Sleeps()) as publisher:
        publisher.send({"n": n} for n in range(60))
    assert Sleeps.noted == [100] * 5, "ten at a time, each time a tenth of a second after the last"


def test_huge_values_and_many_fields_are_published(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "huge.csv"
    names = [f"n{i}" for i in range(MAX_FIELDS)]
    path.write_text(",".join(names) + "\n" + ",".join(["x" * 1000] * MAX_FIELDS) + "\n")
    assert call("publish", "s", str(path), url=client.url).code == 0
    path.write_text("a\n" + "x" * 5_000_000 + "\n")
    assert call("publish", "s", str(path), url=client.url).code == 0
    wide, huge = entries(client)
    assert (len(wide), len(huge[1])) == (2 * MAX_FIELDS, 5_000_000)
    path.write_text(",".join([*names, "one_more"]) + "\n" + ",".join(["x"] * (MAX_FIELDS + 1)) + "\n")
    refused = call("publish", "s", str(path), url=client.url)
    assert refused.code == 1
    assert "an entry has 1 to 3,900 fields" in refused.err


# --- Rows ---


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.dictionaries(
            st.text(st.characters(codec="utf-8"), min_size=1),
            st.one_of(st.binary(), st.text(st.characters(codec="utf-8")), st.integers()),
            min_size=1,
            max_size=4,
        ),
        max_size=8,
    )
)
def test_rows_arrive_byte_for_byte_in_order(client: Client, rows: list[dict[str, Value]]) -> None:
    client.execute("DEL", "s")
    with Publisher(client, "s") as publisher:
        assert publisher.send(rows) == len(rows)
    assert entries(client) == [[part for pair in row.items() for part in map(_as_bytes, pair)] for row in rows]


def test_null_fields_are_left_out_and_numbers_are_written_as_text(client: Client) -> None:
    with Publisher(client, "s") as publisher:
        publisher.send([{"a": 1, "b": None, "c": 2.5, "d": b"\xff", "e": True}, {"a": "", "z": "é"}])
        assert publisher.entries == 2
    assert entries(client) == [
        [b"a", b"1", b"c", b"2.5", b"d", b"\xff", b"e", b"true"],
        [b"a", b"", b"z", "é".encode()],
    ]


@pytest.mark.parametrize("row", [{}, {"a": None}, {"a": object()}, {"a": float("nan")}, {"a": "\ud800"}])
def test_a_row_that_cannot_be_an_entry_is_refused_and_the_rows_before_it_are_published(
    client: Client, row: dict[str, Value]
) -> None:
    with Publisher(client, "s") as publisher, pytest.raises(OutputError):
        publisher.send([{"a": "1"}, row])
    assert client.execute("XLEN", "s") == (0 if row == {"a": "\ud800"} else 1)


def test_a_batch_for_a_key_of_another_type_is_refused_as_a_whole(client: Client, tmp_path: Path) -> None:
    client.execute("SET", "s", "text")
    with Publisher(client, "s") as publisher, pytest.raises(WrongType):
        publisher.send([{"a": "1"}])
    path = tmp_path / "some.csv"
    path.write_text("a\n1\n")
    done = call("publish", "s", str(path), url=client.url)
    assert done.code == 1
    assert "s" in done.err
    assert "0 entries are published" in done.err
    assert client.execute("GET", "s") == b"text"


def test_no_batch_overtakes_a_batch_that_failed(client: Client) -> None:
    client.execute("SET", "s", "text")
    with Publisher(client, "s") as publisher:
        publisher.add(("n",), ("1",))
        with pytest.raises(WrongType):
            publisher.flush()
        client.execute("DEL", "s")
        publisher.add(("n",), ("2",))
        with pytest.raises(WrongType):
            publisher.flush()
    assert not client.execute("EXISTS", "s")


def test_publish_leaves_only_the_stream_and_a_sequence_number_that_expires(client: Client) -> None:
    with Publisher(client, "s") as publisher:
        publisher.send([{"a": "1"}] * 3)
    left = [key for key in client.execute("KEYS", "*") if key != b"s"]
    assert len(left) == 1
    assert left[0].startswith(b"millstream:{s}:s:producer:")
    assert 86_000 < client.execute("TTL", left[0]) <= 86_400


# --- Trouble ---


def test_a_full_redis_is_reported_and_no_batch_is_written_in_part(
    millstream_fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    path = tmp_path / "some.csv"
    path.write_text("a\n" + "1\n" * 100)
    with Client(millstream_fresh_server.url) as client:
        client.execute("CONFIG", "SET", "maxmemory", "1")
        done = call("publish", "s", str(path), "--wait", "0.2", url=client.url)
        assert done.code == 3
        assert "has reached maxmemory and refuses writes" in done.err
        assert "0 entries are published" in done.err
        with Publisher(client, "s", patience_ms=ENDLESS_MS) as publisher:
            publisher.add(("a",), ("1",))
            with relieved_once_refused(client.url):
                publisher.flush()
        assert client.execute("XLEN", "s") == 1
        client.execute("CONFIG", "SET", "maxmemory", "1")
        with Publisher(client, "s", patience_ms=0) as publisher, pytest.raises(OutOfMemory):
            publisher.send([{"a": "1"}])


@pytest.mark.faults
def test_a_connection_that_breaks_repeatedly_neither_loses_nor_doubles_an_entry(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    count = 0
    with (
        _unreliable(millstream_fresh_server.port) as (port, cuts),
        Client(f"redis://127.0.0.1:{port}/0") as client,
        Publisher(client, "s") as publisher,
    ):
        while min(cuts["before"], cuts["after"]) < 5:  # until as many requests, and as many replies, got lost
            rows = [{"n": str(number), "text": "x" * (number % 50)} for number in range(count, count + 2_000)]
            assert publisher.send(rows) == len(rows)
            count += len(rows)
    with Client(millstream_fresh_server.url) as client:
        assert [int(pairs[1]) for pairs in entries(client)] == list(range(count))


@pytest.mark.faults
def test_connections_that_redis_closes_neither_lose_nor_double_an_entry(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    kills = count = 0
    with (
        Client(millstream_fresh_server.url) as client,
        running("publish", "s", "--format", "csv", "--json", url=client.url, stdin=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None
        process.stdin.write(b"n,text\n")
        while kills < 10:
            # More than the pipe holds, so that the process is at work when its connections are closed.
            process.stdin.write(b"".join(b"%d,%s\n" % (n, b"x" * 30) for n in range(count, count + 4_000)))
            count += 4_000
            kills += client.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        outcome = ended(process)
        assert (outcome.code, outcome.json()["entries"]) == (0, count)
        assert [int(pairs[1]) for pairs in entries(client)] == list(range(count))


@pytest.mark.faults
def test_publish_waits_for_a_redis_that_is_killed_and_comes_back(millstream_fresh_server: EmbeddedServer) -> None:
    class Waiting:
        """A clock that shows that a thread waits by it."""

        waits = threading.Event()

        def monotonic_ms(self) -> float:
            return SYSTEM_CLOCK.monotonic_ms()

        def sleep_ms(self, duration_ms: float) -> None:
            self.waits.set()
            SYSTEM_CLOCK.sleep_ms(duration_ms)

    clock = Waiting()

    def kill_and_restart() -> None:
        eventually(lambda: millstream_fresh_server.call("XLEN", "s"), "the first entries")
        millstream_fresh_server.kill()
        clock.waits.wait(FAIL_SAFE_S)
        millstream_fresh_server.start()

    def rows() -> Iterator[dict[str, str]]:
        for number in itertools.count():
            if clock.waits.is_set() and number % 1_000 == 0:
                return
            yield {"n": str(number)}

    url = millstream_fresh_server.url
    with Client(url, clock=clock) as client, Publisher(client, "s", patience_ms=ENDLESS_MS) as publisher:
        trouble = threading.Thread(target=kill_and_restart)
        trouble.start()
        count = publisher.send(rows())
        trouble.join(FAIL_SAFE_S)
        assert [int(pairs[1]) for pairs in entries(client)] == list(range(count))


def test_publish_waits_for_a_redis_that_is_not_up_yet(millstream_fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    millstream_fresh_server.kill()
    log = tmp_path / "log"
    with (
        log.open("wb") as errors,
        running("publish", "s", "a=1", url=millstream_fresh_server.url, stderr=errors) as process,
    ):
        eventually(lambda: "publishing to s waits" in log.read_text(), log=log.read_text)
        millstream_fresh_server.start()
        assert ended(process).code == 0
    assert millstream_fresh_server.call("XLEN", "s") == 1


def test_a_publisher_gives_up_when_its_patience_is_over(millstream_fresh_server: EmbeddedServer) -> None:
    with Client(millstream_fresh_server.url) as client, Publisher(client, "s", patience_ms=300) as publisher:
        publisher.send([{"a": "1"}])
        millstream_fresh_server.kill()
        began = time.monotonic()
        with pytest.raises(Unavailable):
            publisher.send([{"a": "2"}])
        assert time.monotonic() - began >= 0.3
        assert publisher.entries == 1


def test_ctrl_c_ends_publish_at_once_even_while_redis_is_away(
    millstream_fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    path = tmp_path / "some.csv"
    path.write_text("a\n" + "1\n" * 1_000_000)
    with running("publish", "s", str(path), "--wait", "1000000", url=millstream_fresh_server.url) as process:
        eventually(lambda: millstream_fresh_server.call("XLEN", "s"), "the first entries")
        millstream_fresh_server.pause()
        try:
            # What else than Redis could it wait for?
            eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING, "it to wait")
            process.send_signal(signal.SIGINT)
            outcome = ended(process)
        finally:
            millstream_fresh_server.resume()
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


def test_the_progress_bar_shows_the_rate_and_does_not_write_to_stdout(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("a,b\n" + "1,2\n" * 50_000)
    command = f"script -qec '{_command(client.url, path)}' /dev/null"
    shown = subprocess.run(
        ["bash", "-c", command], env=environment(client.url, {"TERM": "xterm"}), capture_output=True, check=False
    )
    assert "entries/s" in shown.stdout.decode()
    assert " %" in shown.stdout.decode()
    quiet = run("publish", "s", str(path), "--json", url=client.url)
    assert quiet.err == ""
    assert quiet.json()["entries"] == 50_000


# --- A connection that breaks ---


@contextmanager
def _unreliable(port: int) -> Iterator[tuple[int, dict[str, int]]]:
    """A proxy to Redis that breaks one in ten exchanges: within the request, or before the reply goes back."""
    cuts = {"before": 0, "after": 0}
    chance = random.Random(7)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, socket.create_connection(("127.0.0.1", port)) as server:
                _relay(client, server, chance, cuts)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], cuts
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(FAIL_SAFE_S)


def _relay(client: socket.socket, server: socket.socket, chance: random.Random, cuts: dict[str, int]) -> None:
    """Pass requests and replies on until one of the two ends, or chance has it."""
    replies = threading.Thread(target=_pass_back, args=(server, client, chance, cuts), daemon=True)
    replies.start()
    try:
        while data := client.recv(65_536):
            if chance.random() < 0.05:
                cuts["before"] += 1
                server.sendall(data[: len(data) // 2])
                break
            server.sendall(data)
    except OSError:
        pass  # the other direction has ended it
    for end in (client, server):
        _shut(end)
    replies.join()


def _pass_back(server: socket.socket, client: socket.socket, chance: random.Random, cuts: dict[str, int]) -> None:
    try:
        while data := server.recv(65_536):
            if chance.random() < 0.1:
                cuts["after"] += 1
                break
            client.sendall(data)
    except OSError:
        pass  # the other direction has ended it
    _shut(client)
    _shut(server)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):  # it may be shut already
        end.shutdown(socket.SHUT_RDWR)


def _command(url: str, path: Path) -> str:
    return f"{' '.join(PROGRAM)} publish s {path} --url {url}"


def _as_bytes(value: Value) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
