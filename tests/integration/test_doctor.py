"""`millstream doctor`: every check finds its trouble on a real Redis, and the command that it prints mends it."""

import logging
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millstream import Message, Reject, Retry
from millstream.admin import inspection, machine_checks
from millstream.admin.acl import RoleName, acl_rule
from millstream.admin.doctor import diagnose
from millstream.admin.findings import Finding
from millstream.admin.liveness import find_workers
from millstream.admin.server_checks import Server, check_role, check_version, warn_of_data_loss
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.keyed_stream import LeaseRelease
from millstream.delivery.last_error import LastError
from millstream.delivery.long_runs import LongRun, report_long_runs
from millstream.delivery.reliable_stream import ReliableStream
from millstream.delivery.restarts import Restart, record_restart
from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import (
    HandlerKeys,
    StreamKeys,
    restarts_key,
    run_name,
    stage_group,
    worker_name_key,
)
from millstream.redis_client.pipelining import server_time_ms
from tests.support.commandline import call
from tests.support.deployments import lent_cluster
from tests.support.findings import found, only
from tests.support.keyed_fixtures import joined_by_field
from tests.support.waiting import eventually
from tests.support.workers import KEYS, double, fill, make, outputs, pending, working

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]

APP = """
from millstream import App

app = App("app")


@app.handler("in", name="other")
def other(message):
    pass
"""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """A server whose settings these tests change."""
    with EmbeddedServer() as started:
        yield started


@pytest.fixture
def admin(server: EmbeddedServer) -> Iterator[Client]:
    """A client of that server, which is empty and well configured."""
    with Client(server.url) as client:
        client.execute("FLUSHALL")
        client.execute(
            *(
                "CONFIG",
                "SET",
                "maxmemory",
                "1000gb",
                "maxmemory-policy",
                "noeviction",
                "appendonly",
                "yes",
                "appendfsync",
            ),
            *("everysec", "save", "", "min-replicas-to-write", "0", "client-output-buffer-limit", "normal 0 0 0"),
            *(
                "aof-load-truncated",
                "no",
                "timeout",
                "0",
                "maxclients",
                "5000",
                "stream-node-max-bytes",
                "4096",
                "stream-node-max-entries",
                "100",
            ),
        )
        yield client


# --- Redis ---

SETTINGS: list[tuple[str, str, tuple[str, ...]]] = [
    ("eviction", "problem", ("maxmemory", "1gb", "maxmemory-policy", "allkeys-lru")),
    ("eviction", "warning", ("maxmemory", "0", "maxmemory-policy", "volatile-ttl")),
    ("persistence", "problem", ("appendonly", "no")),
    ("persistence", "warning", ("appendonly", "no", "save", "3600 1")),
    ("sync", "warning", ("appendfsync", "no")),
    ("truncated", "warning", ("aof-load-truncated", "yes")),
    ("memory", "problem", ("maxmemory", "1mb")),
    ("memory", "warning", ("maxmemory", "0")),
    ("timeout", "warning", ("timeout", "300")),
    ("clients", "warning", ("maxclients", "100")),
    ("nodes", "warning", ("stream-node-max-bytes", "0")),
    ("nodes", "warning", ("stream-node-max-entries", "10000")),
    ("buffers", "warning", ("client-output-buffer-limit", "normal 1mb 0 0")),
]


@pytest.mark.parametrize(("check", "severity", "settings"), SETTINGS)
def test_a_harmful_setting_is_found_and_the_printed_command_mends_it(
    admin: Client, check: str, severity: str, settings: tuple[str, ...]
) -> None:
    fill(admin, 3)
    assert found(diagnose(admin), check) == []
    if "1mb" in settings:
        admin.execute("SET", "big", "x" * 2_000_000)
    admin.execute("CONFIG", "SET", *settings)
    one = only(admin, check)
    assert (one.severity, bool(one.why)) == (severity, True)
    command = shlex.split(one.mend[0], comments=True)
    assert command[0] == "redis-cli"
    admin.execute(*command[command.index("CONFIG") :])
    if "1mb" not in settings:  # twice the limit is still less than a server without data uses
        assert found(diagnose(admin), check) == []


def test_an_entry_that_the_output_buffer_cannot_hold_is_a_problem(admin: Client) -> None:
    admin.execute("XADD", "in", "*", "n", "x" * 3_000_000)
    admin.execute("CONFIG", "SET", "client-output-buffer-limit", "normal 2mb 0 0")
    diagnosis = diagnose(admin)
    assert [one.severity for one in found(diagnosis, "buffers")] == ["problem"]
    assert "not checked" in found(diagnosis, "data")[0].what, "Redis ends the connection that reads the entry"


def test_old_new_and_valkey_versions_are_distinguished() -> None:
    def version(**info: str) -> Finding:
        (one,) = check_version(Server(cli="redis-cli", name="", info=info, settings=dict, calls=dict))
        return one

    assert version(redis_version="6.2.14").severity == "problem"
    assert version(redis_version="7.0.0").severity == version(redis_version="8.2.1").severity == "ok"
    valkey = version(redis_version="7.2.4", server_name="valkey", valkey_version="9.0.1")
    assert (valkey.severity, valkey.what) == ("ok", "Valkey 9.0.1 (as Redis 7.2.4)")


def test_a_replica_is_a_problem_and_a_primary_that_writes_without_replicas_a_warning(admin: Client) -> None:
    with EmbeddedServer() as replica, Client(replica.url) as client:
        host, port = admin.url.rpartition("/")[2].split(":")[0], admin.url.rsplit(":", 1)[1].split("/")[0]
        client.execute("REPLICAOF", host or "127.0.0.1", port)
        assert only(client, "role").severity == "problem"
        eventually(lambda: b"connected_slaves:1" in admin.execute("INFO", "replication"), "the replica")
        one = only(admin, "replicas")
        assert "min-replicas-to-write 0" in one.what
        admin.execute("CONFIG", "SET", "min-replicas-to-write", "1")
        assert found(diagnose(admin), "replicas") == []
        admin.execute("CONFIG", "SET", "min-replicas-to-write", "0")
        admin.execute("CONFIG", "SET", "repl-backlog-size", "1mb")
        command = shlex.split(only(admin, "backlog").mend[0])
        admin.execute(*command[command.index("CONFIG") :])
        assert found(diagnose(admin), "backlog") == []
    assert list(check_role(Server(cli="", name="", info={"role": "master"}, settings=dict, calls=dict))) == []


def test_a_cluster_is_ok_as_a_cluster_and_a_problem_as_one_server(request: pytest.FixtureRequest) -> None:
    deployed = lent_cluster(request)
    with Client(deployed.url) as client:
        diagnosis = diagnose(client)
        assert found(diagnosis, "cluster") == []
        assert sum(one.check == "version" for one in diagnosis.findings) == 3
    with Client(deployed.nodes[0].url) as client:
        assert only(client, "cluster").severity == "problem"


def test_a_redis_that_is_away_is_a_problem_and_the_machine_is_still_checked() -> None:
    outcome = call("doctor", "--json", url="redis://127.0.0.1:1")
    checks = {one["check"]: one["severity"] for one in outcome.json()["findings"]}
    assert (outcome.code, checks["reachable"], checks["python"]) == (1, "problem", "ok")


def test_a_user_of_one_role_is_warned_of_the_checks_that_it_may_not_run(admin: Client) -> None:
    fill(admin, 3)
    ReliableStream(admin, "in", app="app", handler="handle", consumer="w").join()
    admin.execute("XADD", KEYS.dead_letters, "*", "a", "b")
    rights = acl_rule("clerk", [RoleName.OPERATOR]).line.split()
    admin.execute(*rights, ">secret")
    with Client(admin.url.replace("://", "://clerk:secret@")) as client:
        diagnosis = diagnose(client)
        assert only(client, "dead-letters").severity == "problem"
        for check, command in (("settings", "INFO"), ("rights", "ACL WHOAMI")):
            (one,) = found(diagnosis, check)
            assert (one.severity, command in one.what) == ("warning", True)
        admin.execute(*rights, "+acl|whoami", "+acl|dryrun", "+command|info")
        (rights_found,) = [one for one in diagnose(client).findings if one.check == "rights"]
        assert "operator" in rights_found.what
        assert "worker" not in rights_found.what
    admin.execute("ACL", "SETUSER", "clerk", "reset", "on", ">secret", "~*", "+get")
    with Client(admin.url.replace("://", "://clerk:secret@")) as client:
        assert only(client, "access").severity == "problem"


def test_checks_that_lack_the_same_right_are_one_line_that_names_all_of_them(admin: Client) -> None:
    fill(admin, 3)
    admin.execute(*acl_rule("clerk", [RoleName.CONSOLE]).line.split(), ">secret")
    url = admin.url.replace("://", "://clerk:secret@")
    with Client(url) as client:
        unchecked = [one.check for one in diagnose(client).findings if "CONFIG GET" in one.what]
    assert len(unchecked) > 2
    lines = [one for one in call("doctor", url=url).out.splitlines() if "CONFIG GET" in one]
    assert [one.split(": ")[0] for one in lines] == [f"warning  {', '.join(unchecked)}"]


def test_the_default_user_has_the_rights_of_all_roles(admin: Client) -> None:
    (one,) = [one for one in diagnose(admin).findings if one.check == "rights"]
    assert one.severity == "ok"
    admin.execute("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@all", "-xadd", "-ping", "-xread")
    with Client(admin.url.replace("://", "://reader:secret@")) as client:
        (one,) = [one for one in diagnose(client).findings if one.check == "rights"]
    assert "group-source" in one.what
    assert "worker" not in one.what


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("appendonly", "no"), "writes nothing to disk"),
        (("maxmemory", "100mb", "maxmemory-policy", "allkeys-lru"), "evicts keys at maxmemory (maxmemory-policy"),
    ],
)
def test_a_process_warns_once_at_its_start_of_settings_that_lose_data(
    admin: Client, settings: tuple[str, ...], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_data_loss(admin)
        assert caplog.messages == []
        admin.execute("CONFIG", "SET", *settings)
        warn_of_data_loss(admin)
    (line,) = caplog.messages
    assert words in line
    assert "CONFIG SET" in line
    with Client("redis://127.0.0.1:1") as away:
        warn_of_data_loss(away)  # a Redis that is away is reported elsewhere


# --- The machine ---


def test_an_unsuitable_java_or_pyspark_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def spark() -> Finding:
        (one,) = machine_checks.check_spark()
        return one

    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    wrong = spark()
    assert (wrong.severity, f"JAVA_HOME is '{tmp_path}', which has no bin/java" in wrong.what) == ("warning", True)
    assert wrong.mend == ("unset JAVA_HOME",)
    monkeypatch.delenv("JAVA_HOME")
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        assert (spark().severity, "there is no Java" in spark().what) == ("warning", True)
    for version, severity in (("1.8.0_402", "warning"), ("11.0.2", "warning"), ("21.0.1", "ok")):
        java = tmp_path / version / "bin" / "java"
        java.parent.mkdir(parents=True)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / version))
        java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-16' >&2\n")
        java.chmod(0o700)
        assert spark().severity == severity
    monkeypatch.setattr(machine_checks, "version", lambda _: "3.0.1")
    assert "PySpark 3.0.1 is not supported" in spark().what


# --- The data ---


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options with which consumers count as gone as soon as their name is free, and ages count from 0."""
    monkeypatch.setattr(inspection, "find_workers", partial(find_workers, idle_ms=0))
    return {"old_ms": 0}


def test_a_healthy_handler_has_no_finding(client: Client, at_once: dict[str, Any]) -> None:
    fill(client, 20)
    client.execute("SET", worker_name_key("app", "w1"), "its supervisor")
    with working(client, make(double), "w1"):
        eventually(lambda: len(outputs(client)) == 20 and pending(client) == 0)
        diagnosis = diagnose(client, **at_once)
    names = ("dead-consumers", "idle-entries", "waiting", "dead-letters", "parked", "paused", "growth", "leftovers")
    assert [one for name in names for one in found(diagnosis, name)] == []


def test_pending_entries_of_dead_workers_are_a_problem_and_empty_consumers_a_warning(
    client: Client, at_once: dict[str, Any]
) -> None:
    fill(client, 3)
    dead = ReliableStream(client, "in", app="app", handler="handle", consumer="dead")
    dead.join()
    assert len(dead.fetch(count=2)) == 2
    Group(client, "in", KEYS.group).create_consumer("empty")
    holding, empty = found(diagnose(client, **at_once), "dead-consumers")
    assert (holding.severity, "2 pending entries of dead" in holding.what) == ("problem", True)
    assert holding.mend[0].startswith('millstream worker FILE.py  # FILE.py: the file with App("app")')
    assert (empty.severity, "(empty)" in empty.what) == ("warning", True)
    waiting = only(client, "waiting", **at_once)
    assert (waiting.severity, waiting.what.startswith("app.handle: 3 entries wait")) == ("problem", True)
    client.execute("SET", worker_name_key("app", "alive"), "its supervisor")
    Group(client, "in", KEYS.group).create_consumer("alive")
    holding, _ = found(diagnose(client, **at_once), "dead-consumers")
    assert "group claim in millstream:app.handle alive" in holding.mend[0]
    idle = only(client, "idle-entries", **at_once)
    assert (idle.severity, idle.since_ms is None) == ("warning", False)
    before_ms = server_time_ms(client)
    dead.nack([entry for entry, _ in client.execute("XRANGE", "in", "-", "+", "COUNT", 2)])
    since_ms = only(client, "idle-entries", **at_once).since_ms
    assert since_ms is not None
    assert before_ms <= since_ms, "it begins with the nack"
    old = diagnose(client, old_ms=3_600_000)
    assert found(old, "dead-consumers") + found(old, "idle-entries") == [], "the idle time of a nack is no age"


def test_a_backlog_without_a_live_worker_is_a_problem_after_the_time_of_a_restart(client: Client) -> None:
    ReliableStream(client, "in", app="app", handler="handle", consumer="gone").join()
    now_ms = server_time_ms(client)
    client.execute("XADD", "in", f"{now_ms - 31_000}-0", "n", 1)
    assert only(client, "waiting").severity == "problem"
    client.execute("XTRIM", "in", "MAXLEN", 0)
    client.execute("XADD", "in", f"{now_ms + 60_000}-0", "n", 1)
    assert found(diagnose(client), "waiting") == []


def test_a_backlog_that_grows_old_under_a_live_worker_is_a_warning_with_its_beginning(client: Client) -> None:
    ReliableStream(client, "in", app="app", handler="handle", consumer="slow").join()
    client.execute("SET", worker_name_key("app", "slow"), "its supervisor")
    Group(client, "in", KEYS.group).create_consumer("slow")
    began_ms = server_time_ms(client) - 3_600_000
    client.execute("XADD", "in", f"{began_ms}-0", "n", 1)
    late = only(client, "late")
    assert (late.severity, late.handler) == ("warning", "app.handle")
    assert late.since_ms is not None
    assert abs(late.since_ms - began_ms) < 1_800_000
    assert found(diagnose(client, old_ms=24 * 3_600_000), "late") == []


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_stage_that_makes_no_progress_is_a_warning_with_its_beginning(client: Client, is_alive: bool) -> None:
    began_ms = server_time_ms(client) - 3_600_000
    client.execute("XADD", "in", f"{began_ms}-0", "n", 1)
    client.execute("XGROUP", "CREATE", "in", stage_group("shop", "minutes"), "0", "ENTRIESREAD", 0)
    if is_alive:
        client.execute("SET", worker_name_key("shop", run_name("minutes")), 1)
    late = only(client, "stages")
    assert (late.severity, late.handler) == ("warning", None)
    assert late.what.startswith("stage shop.minutes: 1 entry waits, the oldest for ")
    assert ("no run is alive" in (late.why or "")) == (not is_alive)
    assert late.since_ms is not None
    assert abs(late.since_ms - began_ms) < 1_800_000
    assert found(diagnose(client, old_ms=24 * 3_600_000), "stages") == []


def test_a_delayed_message_that_nothing_moves_is_a_problem(client: Client) -> None:
    client.execute("XADD", "in", "*", "n", 1)
    due_ms = server_time_ms(client) - 3_600_000
    client.execute("ZADD", StreamKeys("in").due, due_ms, "1-0")
    overdue = only(client, "overdue")
    assert (overdue.severity, overdue.since_ms) == ("problem", due_ms)
    assert overdue.mend == ("millstream delayed list in",)
    client.execute("ZADD", StreamKeys("in").due, due_ms + 7_200_000, "1-0")
    assert found(diagnose(client), "overdue") == []


def test_processes_that_end_repeatedly_are_a_problem_for_ten_minutes(client: Client) -> None:
    ReliableStream(client, "in", app="app", handler="handle", consumer="w").join()
    for number in range(3):
        restart = Restart(worker="w", incarnation=f"w-{number}", cause="was ended by SIGSEGV")
        record_restart(client, "app", restart)
        record_restart(client, "app", restart)  # after a reply that was lost
        assert only(client, "restarts").severity == ("problem" if number == 2 else "warning")
    assert only(client, "restarts").what == "app: 3 restarts of worker processes within 10 min"
    assert " ago: w was ended by SIGSEGV; the messages that a process ran " in only(client, "restarts").why
    assert found(diagnose(client, app="other"), "restarts") == []
    client.execute(
        "ZADD",
        restarts_key("app"),
        "XX",
        server_time_ms(client) - 1,
        *client.execute("ZRANGE", restarts_key("app"), 0, 0),
    )
    assert ": 2 restarts" in only(client, "restarts").what


def test_dead_letters_parked_keys_and_pauses_are_found_with_their_commands(client: Client) -> None:
    def refuse(message: Message) -> None:
        raise Reject("no")

    fill(client, 3)
    with working(client, make(refuse)):
        eventually(lambda: client.execute("XLEN", KEYS.dead_letters) == 3)
    oldest = client.execute("XRANGE", KEYS.dead_letters, "-", "+", "COUNT", 1)[0][0]
    client.execute("HSET", KEYS.parked, b"kA", "1 why", b"kB", "0 migrating from in.2")
    client.execute("HSET", KEYS.awaiting, b"kB", "in.2")
    CommitStore(client, app="app", handler="handle").set_paused(["in"], paused=True)
    diagnosis = diagnose(client, app="app")
    texts = {name: found(diagnosis, name)[0] for name in ("dead-letters", "parked", "paused")}
    assert [one.what for one in texts.values()] == [
        "app.handle: 3 dead letters, 3 of them new within 15 min",
        "app.handle: 1 parked key",
        "app.handle: paused on in",
    ]
    assert texts["dead-letters"].since_ms == int(oldest.partition(b"-")[0])
    assert texts["parked"].since_ms == 1
    assert [one.mend[0] for one in texts.values()] == [
        "millstream dlq list app.handle",
        "millstream key list app.handle",
        "millstream resume app.handle",
    ]
    assert found(diagnose(client, app="another"), "dead-letters") == []
    (misspelt,) = found(diagnose(client, app="another"), "app")
    assert (misspelt.severity, "named 'another' has run on this Redis" in misspelt.what) == ("problem", True)
    assert found(diagnose(client, app="app"), "app") == []


def test_a_blocked_key_is_found_and_listed_as_such(client: Client) -> None:
    def refuse(message: Message) -> None:
        if message.text("k") == "A":
            raise RuntimeError("no gateway")

    retry = Retry(attempts=2, delay_ms=1, factor=60_000, max_delay_ms=60_000, then="block")
    client.pipeline([("XADD", "in", "*", "k", key) for key in "AABA"])
    with working(client, make(refuse, key="k", retry=retry)):
        eventually(lambda: client.execute("HGET", KEYS.meta, "committed") == b"1", "the message of the other key")
        eventually(lambda: client.execute("ZRANGE", KEYS.backoff, 0, -1, "WITHSCORES"), "the back-off")
        eventually(lambda: found(diagnose(client), "blocked"), "the finding")
        one = only(client, "blocked")
        assert one.what == "app.handle: 1 blocked key"
        assert one.mend[1].startswith("millstream key skip app.handle KEY")
        row = call("key", "list", "app.handle", "--json", url=client.url).json()
        assert (row["state"], row["blocked"], row["attempts"], row["failed_attempts"]) == ("backing off", True, 2, 2)
        assert row["why"].startswith(
            "blocked, as 2 attempts have failed: attempt 3 of its first entry, which has failed for "
        )
        assert found(diagnose(client, app="another"), "blocked") == []


def test_a_stream_that_is_never_trimmed_is_found(client: Client) -> None:
    ids = client.pipeline([("XADD", "in", "*", "n", n) for n in range(12_000)])
    for group in ("a", "b"):
        Group(client, "in", group).create(ids[-1], entries_read=12_000)
    one = only(client, "growth")
    assert "in: 12,000 entries" in one.what
    Group(client, "in", "b").set_id(ids[10], entries_read=11)
    assert found(diagnose(client), "growth") == [], "a group still needs them"
    Group(client, "in", "b").set_id(ids[-1], entries_read=12_000)
    command = shlex.split(one.mend[0], comments=True)
    client.execute(*command[command.index("XTRIM") :])
    assert found(diagnose(client), "growth") == []


def test_leftovers_are_handlers_that_the_app_lacks_and_those_whose_streams_are_gone(
    client: Client, tmp_path: Path
) -> None:
    fill(client, 1)
    with working(client, make(double)):
        eventually(lambda: len(outputs(client)) == 1)
    assert found(diagnose(client), "leftovers") == []
    (tmp_path / "shop_of_doctor.py").write_text(APP)
    shown = call("doctor", "--app", str(tmp_path / "shop_of_doctor.py"), "--json", url=client.url).json()
    (one,) = [each for each in shown["findings"] if each["check"] == "leftovers"]
    assert one["mend"] == ["millstream forget app.handle --dry-run"]
    client.execute("DEL", "in")
    assert "its streams are gone: in" in only(client, "leftovers").what


def test_doctor_checks_a_sample_of_many_streams_and_reports_it(client: Client) -> None:
    client.pipeline([("XADD", f"s:{n}", "1-0", "n", n) for n in range(2_500)])
    diagnosis = diagnose(client, max_streams=100)
    assert (diagnosis.streams, diagnosis.is_sample) == (100, True)
    assert not diagnose(client, max_streams=2_500).is_sample
    outcome = call("doctor", "--limit", "50", url=client.url)
    assert "looked at a sample of 50 streams" in outcome.err


def test_an_operator_checks_a_sample_of_many_streams_with_the_rights_of_its_role(admin: Client) -> None:
    admin.pipeline([("XADD", f"s:{n}", "1-0", "n", n) for n in range(20)])
    admin.execute("XGROUP", "CREATE", "s:1", KEYS.group, "0")
    admin.execute("XADD", HandlerKeys(KEYS.app, KEYS.handler, "s:1").dead_letters, "*", "a", "b")
    admin.execute(*acl_rule("clerk", [RoleName.OPERATOR]).line.split(), ">secret")
    with Client(admin.url.replace("://", "://clerk:secret@")) as client:
        diagnosis = diagnose(client, max_streams=2)
    assert diagnosis.is_sample
    assert found(diagnosis, "access") == found(diagnosis, "data") == []
    assert [one.severity for one in found(diagnosis, "dead-letters")] == ["problem"], "it is new"


ERROR = LastError(error="RuntimeError: no", traceback="", attempts=2, blocks=True)


@pytest.mark.parametrize(
    ("check", "kind", "release"),
    [
        ("parked", "parked key", partial(LeaseRelease, mode="park", detail="failed", failed_attempts=1)),
        (
            "blocked",
            "blocked key",
            partial(LeaseRelease, mode="backoff", detail=60_000, failed_attempts=2, last_error=ERROR.pack()),
        ),
        ("dead-letters", "dead letter", None),
    ],
)
def test_a_sample_of_many_streams_begins_with_those_where_a_message_or_a_key_is_stuck(
    client: Client, check: str, kind: str, release: Callable[..., LeaseRelease] | None
) -> None:
    client.pipeline([("XADD", f"s:{n}", "1-0", "n", n) for n in range(500)])
    for n in (1, 250, 499):
        keyed = joined_by_field(client, f"s:{n}", app="shop", handler="pay")
        client.execute("XADD", f"s:{n}", "*", "key", "a", "n", n)
        if release is None:
            client.execute("XADD", HandlerKeys("shop", "pay", f"s:{n}").dead_letters, "*", "n", n)
            continue
        keyed.enqueue_new(count=100, max_pending=1_000)
        (lease,) = keyed.lease_keys(queues=1, entries=10, run=1, lease_ms=60_000, now_ms=0).leases
        keyed.release_leases([release(lease)])
    diagnosis = diagnose(client, max_streams=50)
    assert (diagnosis.streams, diagnosis.is_sample) == (50, True)
    (found,) = [one for one in diagnosis.findings if one.check == check]
    assert found.what.startswith(f"shop.pay: 3 {kind}s")


def test_dead_letters_on_more_streams_than_are_asked_have_no_time_as_older_ones_may_be_there(client: Client) -> None:
    for n in range(101):
        joined_by_field(client, f"s:{n}", app="shop", handler="pay")
        client.execute("XADD", HandlerKeys("shop", "pay", f"s:{n}").dead_letters, f"{2_000 - n}-0", "n", n)
    (letters,) = found(diagnose(client), "dead-letters")
    assert (letters.what, letters.since_ms) == ("shop.pay: 101 dead letters", None)
    client.execute("DEL", HandlerKeys("shop", "pay", "s:0").dead_letters)
    (letters,) = found(diagnose(client), "dead-letters")
    assert (letters.what, letters.since_ms) == ("shop.pay: 100 dead letters", 1_900)


def test_the_command_ends_with_1_only_if_there_is_a_problem(admin: Client) -> None:
    outcome = call("doctor", url=admin.url)
    assert (outcome.code, outcome.err.splitlines()[-1].startswith("0 problems")) == (0, True)
    admin.execute("CONFIG", "SET", "appendonly", "no")
    outcome = call("doctor", url=admin.url)
    assert outcome.code == 1
    assert outcome.out.startswith('problem  persistence: Redis writes nothing to disk (appendonly no, save "")')
    assert "CONFIG REWRITE" in outcome.err


def test_a_run_in_isolation_is_a_problem_where_no_other_process_could_process_the_rest(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.delivery.long_runs.HELD_MS", 3_600_000)  # no report ends within the test
    run = LongRun(
        handler="app.handle",
        stream="in",
        id="1-0",
        key=None,
        worker="w1",
        started_ms=1,
        time_limit_ms=300_000,
        isolated=True,
    )
    fill(client, 1)

    def severities() -> list[str]:
        report_long_runs(client, "app", [run])
        return [one.severity for one in found(diagnose(client), "long-runs")]

    with working(client, make(double), "w1"):
        eventually(lambda: severities() == ["problem"], "the worker to be seen")
        (finding,) = found(diagnose(client), "long-runs")
        assert "all its handlers wait" in finding.why
        assert finding.mend[0].startswith("millstream worker")
        assert finding.mend[1:] == ("py-spy dump --pid PID  # of the worker w1",), "the handler has no key"
        client.execute("XGROUP", "CREATECONSUMER", "in", KEYS.group, "w2")  # as a second worker that has read
        assert severities() == ["warning"]
