"""The command line as a whole: help, errors, exit codes, pipes and terminals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from millstream.admin.time_inputs import parse_start, parse_time_ms
from millstream.cli.main import COMMANDS, load_command
from millstream.cli.terminal import truncate
from millstream.errors import ConfigError
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.escaping import escape, escape_lines, json_fields, unescape
from millstream.redis_client.formats import format_age, format_size, pluralize
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.server_program import find_server_program
from tests.support.commandline import PROGRAM, Outcome, call, ended, environment, in_a_terminal, run, running
from tests.support.processes import lives

pytestmark = [pytest.mark.cli]

UNREACHABLE = "redis://127.0.0.1:1/0"


def test_help_lists_every_command_with_the_first_sentence_of_its_own_help() -> None:
    listed = call("--help").out
    for name, (_, _, summary) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", listed, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    module, _, attribute = COMMANDS[name][0].partition(":")
    command = getattr(import_module(module), attribute)
    assert isinstance(command, typer.Typer) or command.__doc__
    shown = call(name, "--help")
    assert shown.code == 0
    assert f"{name} [OPTIONS]" in shown.out


def test_usages_name_arguments_in_upper_case_and_optional_ones_in_brackets() -> None:
    def usages(command: Any, *words: str) -> Iterator[str]:
        for name, one in getattr(command, "commands", {}).items():
            yield from usages(one, *words, name)
        if not hasattr(command, "commands"):
            yield command.get_usage(command.make_context(" ".join(words), [], resilient_parsing=True))

    shown = [usage for name in COMMANDS for usage in usages(load_command(name), name)]
    odd = [one for one in shown if not re.fullmatch(r"Usage: [a-z-]+( [a-z-]+)? \[OPTIONS\]( [][A-Z_.]+)*", one)]
    assert odd == []
    assert {
        "Usage: tail [OPTIONS] STREAM...",
        "Usage: publish [OPTIONS] STREAM [FILE_OR_FIELD]...",
        "Usage: info [OPTIONS] [APP]",
        "Usage: key list [OPTIONS] [APP[.HANDLER]]",
        "Usage: acl [OPTIONS] [ROLE]...",
    } <= {*shown}


def test_light_commands_import_neither_spark_nor_modules_of_other_commands() -> None:
    script = (
        "import json, sys\n"
        "from millstream.cli.main import main\n"
        "for args in json.loads(sys.argv[1]):\n"
        "    try: main(args)\n"
        "    except SystemExit: pass\n"
        "    heavy = {'pyspark', 'pyarrow', 'pandas', 'matplotlib', 'rich', 'httpx'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{args} imports {heavy}')"
    )
    light = [["--help"], ["dlq", "--help"], ["tail", "s", "--url", UNREACHABLE], ["info", "--url", UNREACHABLE]]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(light)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_needs_no_redis_client_and_no_server() -> None:
    script = "import sys, millstream.cli.main; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "last"),
    [
        *((name, 3, "error: Redis at redis://127.0.0.1:1/0 cannot be reached: ") for name in ("console", "mcp", "top")),
        *((name, 0, "  ") for name in ("relay postgres --help", "run --help")),
    ],
)
def test_a_command_in_a_python_of_its_own_needs_no_module_that_another_command_imports(
    words: str, code: int, last: str
) -> None:
    done = subprocess.run(
        [*PROGRAM, *words.split()], env=environment(UNREACHABLE), capture_output=True, text=True, check=False
    )
    assert (done.returncode, (done.stdout + done.stderr).rstrip().splitlines()[-1][: len(last)]) == (code, last)


def test_an_unknown_command_gets_a_suggestion() -> None:
    wrong = call("inf")
    assert wrong.code == 2
    assert "did you mean 'info'?" in wrong.err


def test_the_version_is_printed() -> None:
    assert re.fullmatch(r"millstream \d+\.\d+\.\d+\n", call("--version").out)


def test_python_runs_the_package_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "millstream", "inf"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("did you mean 'info'? see: millstream --help\n")


@pytest.mark.parametrize(
    "args",
    [
        ("info",),
        ("tail", "s"),
        ("tail", "s", "--no-follow"),
        ("publish", "s", "--format", "csv", "--wait", "0"),
        ("dlq", "list"),
        ("dlq", "show", "1-0"),
        ("dlq", "purge", "--all", "--yes"),
        ("state", "show", "a.h", "--stream", "s", "k"),
    ],
)
def test_every_command_without_a_server_ends_with_code_3_and_one_line(args: tuple[str, ...]) -> None:
    refused = call(*args, url=UNREACHABLE)
    assert refused.code == 3
    assert refused.out == ""
    assert refused.err == (
        "error: Redis at redis://127.0.0.1:1/0 cannot be reached: connection refused "
        "(is it running? see --url / MILLSTREAM_URL)\n"
    )


NO_URLS = [
    *("http://example.org", "nonsense", "redis://h:port/0", "redis+sentinel://h:1", "redis://h/abc", "redis://h/-1"),
    *("redis://h/0/1", "redis://h/?db=-1", "redis://h/?nonsense=1", "redis+cluster://h/3", "redis+sentinel://h/name/x"),
]


@pytest.mark.parametrize("url", NO_URLS)
def test_an_invalid_url_ends_with_code_2_and_one_line(url: str) -> None:
    refused = call("info", url=url)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert refused.err.startswith("error: ")


def test_the_error_names_a_server_of_another_kind_than_in_the_url(millstream_server: EmbeddedServer) -> None:
    place = f"127.0.0.1:{millstream_server.port}"
    for url, message in (
        (f"redis+cluster://{place}", "is a single server, not a Redis Cluster; connect with redis://"),
        (f"redis+sentinel://{place}/name", "is not a Sentinel"),
        (f"redis://{place}/99", "has no database of this number"),
    ):
        refused = call("info", url=url)
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert message in refused.err


def test_a_cluster_that_is_away_is_unavailable() -> None:
    refused = call("info", url="redis+cluster://127.0.0.1:1")
    assert (refused.code, refused.err.count("\n")) == (3, 1)
    assert "cannot be reached" in refused.err


def test_the_error_distinguishes_a_server_that_is_no_redis_from_one_that_is_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            near, _ = listener.accept()
            with near:
                near.recv(65_536)
                near.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        refused = call("info", url=f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
    assert (refused.code, refused.err.count("\n")) == (3, 1)
    assert "is not Redis" in refused.err
    assert "check host and port" in refused.err


def test_a_password_is_never_shown() -> None:
    assert "secret" not in call("info", url="redis://me:secret@127.0.0.1:1/0").err
    assert "secret" not in call("info", url="http://me:secret@127.0.0.1:1/0").err


def test_refused_credentials_end_with_code_3(millstream_fresh_server: EmbeddedServer) -> None:
    millstream_fresh_server.call("CONFIG", "SET", "requirepass", "right")
    refused = call("info", url=millstream_fresh_server.url.replace("//", "//:wrong@"))
    assert refused.code == 3
    assert refused.err.count("\n") == 1


def test_debug_shows_the_traceback_and_keeps_the_exit_code() -> None:
    assert "Traceback" not in call("info", url=UNREACHABLE).err
    shown = call("--debug", "info", url=UNREACHABLE)
    assert shown.code == 3
    assert "Traceback" in shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tail",), "missing argument 'STREAM...'; see: millstream tail --help"),
        (("info", "--limt", "3"), "no such option: --limt; did you mean --limit? see: millstream info --help"),
        (
            ("worker", "a.py", "--proceses", "2"),
            "no such option: --proceses; did you mean --processes? see: millstream worker --help",
        ),
        (
            ("worker", "a.py", "--processes", "two"),
            "invalid value for '--processes': 'two' is not a whole number of at least 1; see: millstream worker --help",
        ),
        (("worker", "a.py", "--processes", "0"), "invalid value for '--processes': 0 is not a whole number of at le"),
        (("info", "a", "b"), "got unexpected extra argument(s) (b); see: millstream info --help"),
        (("info", "--url"), "option '--url' requires an argument; see: millstream info --help"),
        (
            ("publish", "s", "--format", "xml"),
            "invalid value for '--format': 'xml' is not one of 'csv', 'jsonl'; see: ",
        ),
        (("info", "--limit", "many"), "invalid value for '--limit': "),
        (("publish", "s", "x.csv", "--rate", "0"), "invalid value for '--rate': "),
        (("--nope",), "no such option: --nope; see: millstream --help"),
        (("nonsense",), "no such command 'nonsense'; see: millstream --help"),
        (("keys",), "no such command 'keys'; did you mean 'millstream key list'? see: millstream --help"),
        (("key", "lst"), "no such command 'lst'; did you mean 'list'? see: millstream key --help"),
        (("rate", "shop.pay"), "no such command 'shop.pay'; use clear, set or show; see: millstream rate --help"),
        (("relay", "run"), "no such command 'run'; use postgres; see: millstream relay --help"),
        (
            ("consumer", "pay.py:pay", "--name", "c1", "--ticket-stream", "orders"),
            "a consumer needs --concurrency-stream-group, --master-register-api-url and --master-acknowledge-api-url; see: ",
        ),
        (("key", "list", "--\x1b[31m"), "no such option: --\\x1b[31m; see: millstream key list --help"),
    ],
)
def test_wrong_usage_ends_with_code_2_and_one_line_as_other_errors_do(words: tuple[str, ...], message: str) -> None:
    refused = call(*words)
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert refused.err.startswith(f"error: {message}")


def test_a_command_without_a_verb_shows_its_help() -> None:
    shown = call("key")
    assert shown.code == 2
    assert "park" in shown.out + shown.err
    assert "error:" not in shown.err


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("unix:///no/where", "no such file or directory"),
        ("redis+cluster://127.0.0.1:1", "connection refused"),
        ("redis+sentinel://127.0.0.1:1/name", "no Sentinel that answers knows a primary 'name' that is up"),
    ],
)
def test_the_cause_of_an_unreachable_redis_is_printed_once(url: str, message: str) -> None:
    refused = call("info", url=url)
    assert refused.code == 3
    assert refused.err == (
        f"error: Redis at {url} cannot be reached: {message} (is it running? see --url / MILLSTREAM_URL)\n"
    )


def test_a_closed_pipe_is_quiet(millstream_url: str) -> None:
    with Client(millstream_url) as client:
        client.pipeline([("XADD", "s", "*", "field", "x" * 1000)] * 500)
    command = " ".join(PROGRAM) + " tail s --no-follow | head -n 1; exit ${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", command], env=environment(millstream_url), capture_output=True, check=False)
    assert done.returncode == 141
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""


def test_ctrl_c_is_quiet_and_ends_with_code_130(millstream_url: str) -> None:
    with running("tail", "s", "--from", "earliest", url=millstream_url) as process:
        with Client(millstream_url) as client:
            client.execute("XADD", "s", "*", "a", "b")
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        assert process.stderr.readline() == b"following 1 stream; Ctrl-C ends it\n"
        process.send_signal(signal.SIGINT)
        assert ended(process) == Outcome(code=130, out="", err="")


@pytest.mark.parametrize("no_color", [False, True])
def test_tables_are_drawn_in_a_terminal_and_obey_no_color(millstream_url: str, no_color: bool) -> None:
    with Client(millstream_url) as client:
        client.execute("XADD", "\x1b[31mred[bold]", "*", "a", "b")
    env = {"TERM": "xterm-256color", "COLUMNS": "200", **({"NO_COLOR": "1"} if no_color else {})}
    shown = in_a_terminal("info", url=millstream_url, env=env).out
    assert "─" in shown
    assert "\\x1b[31mred[bold]" in shown
    assert "\x1b[31m" not in shown
    plain = call("info", url=millstream_url)
    assert "─" not in plain.out
    assert "\\x1b[31mred[bold]" in plain.out


def test_long_texts_of_a_table_move_below_its_rows_in_a_narrow_terminal(client: Client) -> None:
    keys = HandlerKeys("shop", "charge", "payments")
    why = "failed: RuntimeError: gateway says no: connection to payments.example.org timed out after 30 seconds"
    client.execute("XADD", keys.stream, "1-0", "a", "b")
    client.execute("HSET", keys.meta, "owner", "keyed")
    client.execute("HSET", keys.parked, "kann", f"1000 {why}", "kbob", f"1000 {why}")
    narrow, wide = (
        re.sub(r"\x1b\[[0-9;]*m", "", in_a_terminal("key", "list", "shop.charge", url=client.url, env=env).out)
        for env in ({"TERM": "xterm", "COLUMNS": "80"}, {"TERM": "xterm", "COLUMNS": "300"})
    )
    lines = narrow.replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if "  payments  " in line]
    assert sorted(rows) == [["ann", "payments", "parked", "0"], ["bob", "payments", "parked", "0"]]
    assert " ".join(narrow.split()).count(f": {why}") == 2, "no word of it is broken"
    assert len([line for line in wide.splitlines() if why in line and line.startswith(("ann", "bob"))]) == 2
    piped = call("key", "list", "shop.charge", url=client.url).out
    assert len([line for line in piped.splitlines() if why in line and line.startswith(("ann", "bob"))]) == 2


def test_a_question_is_asked_in_a_terminal_only(millstream_url: str) -> None:
    with Client(millstream_url) as client:
        client.execute("HSET", "millstream:{s}:s:a.h:state", "k", b"\x80")
    unasked = call("state", "reset", "a.h", "--stream", "s", "k", url=millstream_url)
    assert unasked.code == 2
    assert "add --yes" in unasked.err
    reset = ("state", "reset", "a.h", "--stream", "s", "k")
    assert "Aborted" in in_a_terminal(*reset, url=millstream_url, answer=b"n\n").out
    with Client(millstream_url) as client:
        assert client.execute("HLEN", "millstream:{s}:s:a.h:state") == 1
        assert "1 key reset" in in_a_terminal(*reset, url=millstream_url, answer=b"y\n").out
        assert client.execute("HLEN", "millstream:{s}:s:a.h:state") == 0


# --- The small things ---


@given(st.binary())
def test_any_bytes_are_shown_as_one_harmless_line_and_read_back(data: bytes) -> None:
    assert escape(data).isprintable()
    assert unescape(escape(data)) == data


@given(st.text())
def test_no_control_character_is_printed_but_the_end_of_a_line(text: str) -> None:
    assert all(line.isprintable() for line in escape_lines(text).split("\n"))


def test_a_backslash_that_escapes_nothing_is_refused() -> None:
    for text in ("\\", "\\x1", "a\\q"):
        with pytest.raises(ConfigError, match="backslash"):
            unescape(text)


def test_fields_that_a_mapping_cannot_hold_are_printed_as_pairs_too() -> None:
    assert json_fields([b"a", b"1", b"b", b"\xff"]) == {"fields": {"a": "1", "b": {"hex": "ff"}}}
    repeated = json_fields([b"a", b"1", b"a", b"2"])
    assert repeated == {"fields": {"a": "2"}, "pairs": [("a", "1"), ("a", "2")]}
    assert json_fields([b"\xff", b"1"]) == {"fields": {"\\xff": "1"}, "pairs": [({"hex": "ff"}, "1")]}


def test_times_are_read_as_ids_words_or_dates() -> None:
    assert parse_start("latest") is None
    assert parse_start("earliest") == EntryId(0, 0)
    assert parse_start("1700000000000-7") == EntryId(1700000000000, 7)
    assert parse_start("2013-01-31T06:00") == EntryId(1359612000000, 0)
    assert parse_start("2013-01-31T06:00+01:00") == EntryId(1359608400000, 0)
    assert parse_start("20130131") == EntryId(1359590400000, 0)
    assert [parse_start(one) for one in ("1969-12-31", "99999d")] == [EntryId(0, 0)] * 2, "as earliest: no id is below"
    before, found, after = time.time(), parse_time_ms("2h"), time.time()
    assert (before - 7200) * 1000 - 1 <= found <= (after - 7200) * 1000
    with pytest.raises(ConfigError, match="not a time"):
        parse_start("soon")


def test_figures_are_printed_in_readable_units() -> None:
    assert [format_age(ms) for ms in (None, 0, 90_000, 150_000, 7.3e6, 3e8)] == [
        "-",
        "0.0 s",
        "90.0 s",
        "2 min",
        "2 h",
        "3 d",
    ]
    assert [format_size(count) for count in (999, 1000, 2.5e6, 3e9)] == ["999 bytes", "1.0 kB", "2.5 MB", "3.0 GB"]
    assert [pluralize(1, "entry", "entries"), pluralize(2000, "key")] == ["1 entry", "2,000 keys"]
    assert [truncate("abcdef", 6), truncate("abcdefg", 6)] == ["abcdef", "abc..."]


def test_millstream_dev_runs_a_server_until_a_signal_stops_it(tmp_path: Path) -> None:
    program = find_server_program()
    for number in (signal.SIGTERM, signal.SIGINT):
        with running("dev", "--data-dir", str(tmp_path / "data"), "--port", "0", "--json") as process:
            assert process.stdout is not None
            started = json.loads(process.stdout.readline())
            assert (started["server"], started["program"]) == (program.version, program.path)
            with Client(started["url"]) as client:
                assert client.execute("INCR", "starts") == (1 if number is signal.SIGTERM else 2)
            process.send_signal(number)
            outcome = ended(process)
        assert (outcome.code, outcome.err) == (0, "")
        assert not lives(started["pid"])


def test_millstream_dev_reports_that_its_port_is_in_use_and_that_its_server_died(
    millstream_server: EmbeddedServer, tmp_path: Path
) -> None:
    refused = run("dev", "--data-dir", str(tmp_path), "--port", str(millstream_server.port))
    assert refused.code == 1
    assert "is in use" in refused.err
    with running("dev", "--data-dir", str(tmp_path), "--port", "0", "--json") as process:
        assert process.stdout is not None
        os.kill(json.loads(process.stdout.readline())["pid"], signal.SIGKILL)
        outcome = ended(process)
    assert outcome.code == 1
    assert outcome.err.startswith("error: redis-server has ended")
