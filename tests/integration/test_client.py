"""The client: no silent retries, errors in our own words, and waiting that can be seen."""

import logging
import re
import threading

import pytest
import redis

from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import (
    AccessDenied,
    CommandFailed,
    ConfigError,
    GroupMissing,
    KeyMissing,
    OutOfMemory,
    RedisError,
    Unavailable,
    WrongType,
)
from millstream.redis_client.call import Call
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.error_translation import translate
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.redaction import redact_url
from millstream.redis_client.scripts import Script
from millstream.testing.proxy import Proxy
from millstream.testing.topologies import tls_server
from tests.support.calls import calls_of
from tests.support.clocks import ManualClock
from tests.support.command_stats import commands_run
from tests.support.keyed_fixtures import joined_by_field

pytestmark = [pytest.mark.cli, pytest.mark.groups]


def test_a_command_whose_reply_is_lost_is_executed_once_and_reported(
    millstream_server: EmbeddedServer, client: Client
) -> None:
    with Proxy(millstream_server.port) as proxy, Client(proxy.url) as unlucky:
        proxy.cut_after("XADD")
        with pytest.raises(Unavailable, match="cannot be reached"):
            unlucky.execute("XADD", "s", "*", "a", "1")
    assert client.execute("XLEN", "s") == 1


def test_a_rediss_url_of_a_port_without_tls_is_reported_as_such(
    millstream_server: EmbeddedServer,
) -> None:
    url = millstream_server.url.replace("redis://", "rediss://")
    with Client(url, timeout_ms=200) as client, pytest.raises(Unavailable, match="needs a port that speaks TLS"):
        client.execute("PING")


def test_calls_are_sent_together_and_a_refused_one_is_an_error_among_the_results(client: Client) -> None:
    client.execute("RPUSH", "list", "a")
    calls = [Call(("INCR", key), int) for key in ("one", "list", "two")]
    results = client.run_all(calls)
    assert (client.execute("GET", "one"), client.execute("GET", "two")) == (b"1", b"1"), "sent before a result is taken"
    first, refused, last = results
    assert (first, last, type(refused)) == (1, 1, WrongType)
    with pytest.raises(WrongType):
        client.run(calls[1])


def test_a_call_may_say_what_an_error_reply_means(client: Client) -> None:
    client.execute("RPUSH", "list", "a")
    call = Call(("INCR", "list"), int, on_error=lambda error: -len(str(error)))
    assert list(client.run_all([call])) == [client.run(call)]
    assert client.run(call) < 0


def test_more_calls_than_one_round_trip_takes_have_their_results_in_order(client: Client) -> None:
    assert list(client.run_all([Call(("ECHO", n), int) for n in range(2_500)])) == list(range(2_500))


def test_an_error_reply_of_a_script_has_a_code_and_a_detail_of_its_own(client: Client) -> None:
    stale = "return redis.error_reply('STALE token 1 is older than epoch 2: LOST')"
    with pytest.raises(CommandFailed) as caught:
        client.execute("EVAL", stale, 0)
    assert (caught.value.code, caught.value.detail) == ("STALE", "token 1 is older than epoch 2: LOST")
    client.execute("XGROUP", "CREATE", "s", "g", "0", "MKSTREAM")
    with pytest.raises(CommandFailed) as caught:
        client.execute("XGROUP", "CREATE", "s", "g", "0")
    assert caught.value.code == "BUSYGROUP"
    with pytest.raises(CommandFailed) as caught:
        client.execute("NOSUCH", "STALE")
    assert (caught.value.code, "STALE" in caught.value.detail) == ("", True), "words of the user are no code"


def test_errors_of_the_library_are_translated_into_our_own(client: Client) -> None:
    client.execute("SET", "text", "1")
    with pytest.raises(WrongType, match="XADD text: the key holds another type"):
        client.execute("XADD", "text", "*", "a", "1")
    with pytest.raises(GroupMissing, match="NOGROUP"):
        client.execute("XREADGROUP", "GROUP", "g", "c", "STREAMS", "s", ">")
    with pytest.raises(CommandFailed, match="NOSUCH x"):
        client.execute("NOSUCH", "x")
    client.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(OutOfMemory, match="free memory or raise it"):
            client.execute("XADD", "s", "*", "a", "1")
    finally:
        client.execute("CONFIG", "SET", "maxmemory", "0")


def test_the_error_names_the_key_that_holds_the_wrong_type(client: Client) -> None:
    client.execute("SET", "text", "1")
    client.execute("XGROUP", "CREATE", "a", "g", "$", "MKSTREAM")
    script = Script("groups/ack_owned")
    for command, words in (
        (lambda: client.execute("XGROUP", "CREATE", "text", "g", "$"), "XGROUP CREATE text: the key holds .* delete"),
        (lambda: client.execute("XINFO", "STREAM", "text"), "XINFO STREAM text: the key holds"),
        (lambda: client.execute("XREAD", "STREAMS", "a", "text", "0", "0"), "XREAD on a, text: text holds a string"),
        (
            lambda: client.script(script, ("text",), ("g", "c", "1-1")),
            "the script groups/ack_owned.lua: text holds a string where a stream",
        ),
        (
            lambda: stream_of(client, "text").join(),
            "the script commit/join_workers.lua: text holds a string where a stream is needed",
        ),
    ):
        with pytest.raises(WrongType, match=words):
            command()
    keys = HandlerKeys("shop", "bill", "a")
    client.execute("RPUSH", keys.meta, "x")
    with pytest.raises(
        WrongType,
        match=f"the script commit/join_workers.lua: {re.escape(keys.meta)} holds a list where a hash is needed",
    ):
        stream_of(client, "a").join()


def test_the_error_names_the_wrong_key_and_not_those_of_other_types_that_are_right(client: Client) -> None:
    keys = HandlerKeys("shop", "bill", "calls")
    stream = stream_of(client, "calls")
    stream.join()
    client.execute("SET", "calls", "text")
    with pytest.raises(WrongType, match="calls holds a string where a stream is needed: rename or delete that key"):
        stream_of(client, "calls").join()
    client.execute("DEL", "calls")
    client.execute("XADD", "calls", "*", "n", 1)
    client.execute("DEL", keys.meta)
    client.execute("SET", keys.meta, "text")
    with pytest.raises(WrongType, match=f"{re.escape(keys.meta)} holds a string where a hash is needed: rename"):
        stream_of(client, "calls").join()


@pytest.mark.parametrize("line", ["redis.call('XLEN', KEYS[2])", "local key = KEYS[2]; redis.call('XLEN', key)"])
def test_a_script_names_the_wrong_key_by_its_line_or_as_the_key_of_a_user(client: Client, line: str) -> None:
    script = Script("shared/one_line")
    script.text = f"#!lua\n{line}"
    client.execute("HSET", "millstream:mine", "a", 1)
    client.execute("SET", "s", "text")
    with pytest.raises(WrongType, match=r"one_line\.lua: s holds a string where a stream is needed"):
        client.script(script, ("millstream:mine", "s"), ())


def test_the_error_of_a_script_that_returns_it_names_the_key_too(client: Client) -> None:
    stream = joined_by_field(client, "calls", app="shop", handler="pay")
    client.execute("SET", "calls", "text")
    with pytest.raises(WrongType, match=r"keys/lease_keys\.lua: calls holds another type of value than a stream"):
        stream.lease_keys(queues=1, entries=1, run=1, lease_ms=60_000, now_ms=0)


def stream_of(client: Client, stream: str) -> ReliableStream:
    return ReliableStream(client, stream, app="shop", handler="bill", consumer="w", into="out")


@pytest.mark.parametrize("right", ["hset", "xack", "hincrby", "xpending"])
def test_the_error_of_a_revoked_right_names_the_command_and_how_to_get_the_right(
    client: Client, clerk: Client, right: str
) -> None:
    client.execute("XADD", "orders", "*", "n", 1)
    stream = stream_of(clerk, "orders")
    stream.join()
    entries = stream.fetch(count=1)
    client.execute("ACL", "SETUSER", "clerk", f"-{right}")
    with pytest.raises(AccessDenied) as caught:
        stream.ack(*entries)
    assert right.upper() in str(caught.value)
    assert "`millstream acl` prints the required rights" in str(caught.value)
    assert not caught.value.concerns_key


def test_the_error_names_the_keys_that_a_user_may_not_access(client: Client, clerk: Client) -> None:
    client.execute("ACL", "SETUSER", "clerk", "resetkeys", "~millstream:*")
    for command, words in (
        (
            lambda: stream_of(clerk, "orders").join(),
            "the script commit/join_workers.lua: .*: orders, out; `millstream acl`",
        ),
        (lambda: clerk.execute("XREAD", "STREAMS", "a", "millstream:x", "0", "0"), "XREAD on a, millstream:x: .*: a; "),
        (lambda: clerk.execute("XINFO", "STREAM", "orders"), "XINFO STREAM orders: .*; `millstream acl`"),
    ):
        with pytest.raises(AccessDenied, match=words) as caught:
            command()
        assert caught.value.concerns_key


def test_the_error_of_a_replica_names_it_as_a_replica() -> None:
    with EmbeddedServer() as primary, EmbeddedServer(extra={"replicaof": f"127.0.0.1 {primary.port}"}) as server:
        with Client(server.url) as client, pytest.raises(Unavailable, match="is a replica, which accepts no writes"):
            client.execute("XADD", "s", "*", "a", "1")
        sentinel = server.url.replace("redis://", "redis+sentinel://") + "/name"
        assert "failing over" in str(translate(redis.exceptions.ReadOnlyError("READONLY"), sentinel, ("XADD", "s")))


@pytest.mark.usefixtures("tls")
@pytest.mark.parametrize("user", ["", "clerk:pw@"])
def test_a_connection_over_tls_is_made_with_and_without_a_user(user: str) -> None:
    """Servers send session tickets unasked, which must not be read as the answer to something."""
    with tls_server() as deployed, Client(deployed.url) as admin:
        admin.execute("ACL", "SETUSER", "clerk", "on", ">pw", "~*", "+ping")
        for _ in range(20):
            with Client(deployed.url.replace("://", f"://{user}")) as client:
                assert client.execute("PING") == b"PONG"
        assert admin.execute("ACL", "LOG") == []


REFUSALS = {
    "Redis 7.0": (
        "The user executing the script can't run this command or subcommand script: {sha}, on @user_script:{line}.",
        (
            "The user executing the script can't access at least one of the keys mentioned in the command arguments script: "
            "{sha}, on @user_script:{line}."
        ),
    ),
    "Redis 7.2 and 8": (
        "ACL failure in script: User clerk has no permissions to run the 'xadd' command script: {sha}, on @user_script:{line}.",
        "ACL failure in script: No permissions to access a key script: {sha}, on @user_script:{line}.",
    ),
    "Valkey 9": (
        "ACL failure in script: User clerk has no permissions to run the 'xadd' command script: on @user_script:{line}.",
        "ACL failure in script: No permissions to access a key script: on @user_script:{line}.",
    ),
}


@pytest.mark.parametrize("texts", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_in_a_script_is_recognised_in_the_words_of_every_server(texts: tuple[str, str]) -> None:
    script = Script("producer/redrive")
    line = 1 + next(at for at, one in enumerate(script.text.splitlines()) if "'XADD'" in one)
    for of_key, text in enumerate(texts):
        error = redis.exceptions.ResponseError(text.format(sha=script.sha, line=line))
        found = translate(error, "redis://h", ("EVALSHA", script.sha, 1, "orders"))
        assert isinstance(found, AccessDenied)
        assert found.concerns_key == bool(of_key)
        assert f"the script producer/redrive.lua: {text.partition(' script: ')[0]}" in str(found)
        assert f"(XADD, line {line} of the script)" in str(found)
        assert script.sha not in str(found)


@pytest.mark.parametrize(
    "command", [("XINFO", "STREAM", "none"), ("XINFO", "GROUPS", "none"), ("XGROUP", "CREATE", "none", "g", "0")]
)
def test_a_missing_key_that_has_to_exist_is_recognised_in_the_words_of_every_server(
    client: Client, command: tuple[str, ...]
) -> None:
    with pytest.raises(KeyMissing, match=r"none: .*key"):
        client.execute(*command)


def test_a_pipeline_returns_errors_at_their_positions_and_runs_the_rest(client: Client) -> None:
    client.execute("SET", "text", "1")
    replies = client.pipeline([("XADD", "s", "1-1", "a", "1"), ("XADD", "text", "*", "a", "1"), ("XLEN", "s")])
    assert replies[0] == b"1-1"
    assert isinstance(replies[1], WrongType)
    assert replies[2] == 1
    assert client.pipeline([]) == []


def test_names_that_are_not_text_are_sent_as_they_were_received(client: Client) -> None:
    client.execute("SET", "a\udcff", "1")
    assert client.pipeline([("GET", b"a\xff"), ("GET", "a\udcff")]) == [b"1", b"1"]


def test_the_next_command_after_a_broken_connection_opens_a_new_one(
    client: Client, millstream_server: EmbeddedServer
) -> None:
    number = client.execute("CLIENT", "ID")
    with Client(millstream_server.url) as other:
        other.execute("CLIENT", "KILL", "ID", number)
    with pytest.raises(Unavailable):
        client.execute("PING")
    assert client.execute("PING") == b"PONG"


def test_a_refused_connection_is_unavailable_and_its_error_shows_no_password() -> None:
    with Client("redis://user:secret@127.0.0.1:1/0") as client, pytest.raises(Unavailable) as caught:
        client.execute("PING")
    assert "secret" not in str(caught.value)
    assert redact_url("redis://:secret@host:1/0") == "redis://:***@host:1/0"
    assert redact_url("redis://host:1/0") == "redis://host:1/0"


def test_the_error_of_a_url_without_two_slashes_names_all_schemes() -> None:
    for url in ("redis:/localhost:1", "unix:/tmp/socket"):
        with Client(url) as client, pytest.raises(ConfigError, match=r"begin with redis://.* or redis\+cluster://"):
            client.execute("PING")


@pytest.mark.parametrize(
    "url",
    ["http://host", "host:6379", "redis+sentinel://host:1", "redis+other://host:1", "redis://host:port/0", ""],
)
def test_the_error_of_a_bad_url_shows_a_good_one(url: str) -> None:
    with Client(url) as client, pytest.raises(ConfigError):
        client.execute("PING")


def test_a_client_connects_without_a_look_at_the_installed_packages(millstream_url: str) -> None:
    def connect() -> None:
        with Client(millstream_url) as new:
            new.execute("PING")

    names = calls_of(connect)
    assert "parse_url" in names
    assert "get_lib_version" not in names


def test_patience_waits_with_back_off_logs_it_and_ends_when_redis_answers(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    client = Client("redis://127.0.0.1:1/0", clock=clock)

    def away_for_ten_seconds() -> str:
        if clock.now_ms < 10_000:
            raise Unavailable("away")
        return "here"

    with caplog.at_level(logging.WARNING):
        assert client.retry_while_unavailable(away_for_ten_seconds, what="the test") == "here"
    lines = [record.getMessage() for record in caplog.records]
    assert 3 <= len(lines) <= 5
    assert lines[0] == "Redis is unavailable: away; the test waits, 0 s so far"
    assert lines[-1].startswith("the test resumes: Redis is available again after 1")


def test_the_first_warning_of_an_unreachable_redis_says_what_to_check(caplog: pytest.LogCaptureFixture) -> None:
    with Client("redis://127.0.0.1:1/0", clock=ManualClock()) as client, pytest.raises(Unavailable):
        client.retry_while_unavailable(lambda: client.execute("PING"), what="the test", limit_ms=20_000)
    first, *others = [record.getMessage() for record in caplog.records]
    assert first.endswith("refused (is it running? see --url / MILLSTREAM_URL); the test waits, 0 s so far")
    assert others
    assert not any("is it running" in one for one in others)


def test_patience_is_limited_if_a_limit_is_set_and_applies_to_no_other_errors() -> None:
    clock = ManualClock()
    client = Client("redis://127.0.0.1:1/0", clock=clock)
    calls = []

    def fail(error: RedisError) -> None:
        calls.append(error)
        raise error

    with pytest.raises(Unavailable):
        client.retry_while_unavailable(lambda: fail(Unavailable("away")), what="the test", limit_ms=5_000)
    assert 5_000 <= clock.now_ms <= 7_000
    calls.clear()
    with pytest.raises(AccessDenied):
        client.retry_while_unavailable(lambda: fail(AccessDenied("no")), what="the test")
    assert len(calls) == 1


def test_an_unanswered_command_runs_and_the_one_after_it_is_answered(client: Client) -> None:
    client.pipeline([("XADD", "s", f"{n}-0", "a", n) for n in range(1, 101)])
    client.execute("XGROUP", "CREATE", "s", "g", "0")
    silent = ("XREADGROUP", "GROUP", "g", "c", "COUNT", 40, "NOACK", "STREAMS", "s", ">")
    (((*_, last_delivered, _, read, _, _),),) = client.pipeline_skipping([(silent, ("XINFO", "GROUPS", "s"))])
    assert (last_delivered, read) == (b"40-0", 40)
    assert client.execute("PING") == b"PONG"


def test_a_pattern_finds_streams_and_no_other_keys(client: Client) -> None:
    client.pipeline([("XADD", f"orders:{n}", "*", "a", 1) for n in range(2500)])
    client.execute("SET", "orders:text", "1")
    client.execute("XADD", "other", "*", "a", 1)
    found = client.scan_streams("orders:*")
    assert len(found) == 2500
    assert found == sorted(set(found))


def test_a_pattern_of_all_streams_leaves_dead_letter_queues_out_unless_it_names_them(client: Client) -> None:
    for name in ("orders", "millstream:{orders}:orders:app.handler:dead"):
        client.execute("XADD", name, "*", "a", 1)
    assert client.scan_streams("*") == ["orders"]
    assert client.scan_streams("millstream:*") == ["millstream:{orders}:orders:app.handler:dead"]


def test_scripts_run_after_the_server_lost_them_in_a_pipeline_too(client: Client) -> None:
    name = Script("shared/hold_name")
    client.execute("SCRIPT", "FLUSH")
    assert client.scripts([(name, (f"n{n}",), ("me", 60_000)) for n in range(3)]) == [1, 1, 1]
    assert client.execute("EXISTS", "n0", "n1", "n2") == 3


def test_calls_of_scripts_that_the_server_lacks_have_their_results_at_their_positions(client: Client) -> None:
    script = Script("shared/hold_name")
    client.execute("SCRIPT", "FLUSH")
    calls = [Call(script.command((f"n{n}",), ("me", 60_000)), int) for n in range(2)]
    assert list(client.run_all([calls[0], Call(("ECHO", "a"), bytes), calls[1]])) == [1, b"a", 1]
    assert client.execute("EXISTS", "n0", "n1") == 2


def test_threads_share_a_client_without_mixing_up_replies(client: Client) -> None:
    wrong: list[object] = []

    def ask(number: int) -> None:
        wrong.extend(
            reply for _ in range(200) if (reply := client.execute("ECHO", str(number))) != str(number).encode()
        )

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_error_of_a_script_names_the_script_and_the_line_but_neither_its_hash_nor_its_text(client: Client) -> None:
    script = Script("commit/forget_progress")
    for _ in range(2):  # sent as text, then called by its hash
        with pytest.raises(
            CommandFailed, match=r"^the script commit/forget_progress.lua: .*\(line \d+ of the script\)$"
        ) as caught:
            client.script(script, ["a", "b", "c", "d"], [])
        assert script.sha not in str(caught.value)


def test_the_text_of_a_missing_script_is_sent_once_to_a_server(client: Client) -> None:
    script = Script("shared/hold_name")
    before = commands_run(client.execute)
    client.try_scripts([(script, (f"n{n}",), ("me", 60_000)) for n in range(50)])
    assert client.execute("EXISTS", *(f"n{n}" for n in range(50))) == 50
    assert (commands_run(client.execute) - before)["eval"] < 10, "others may use the server"
