"""Masters and consumers that die, hang, lose calls and each other: nothing is lost, and no ticket is out of order."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from millstream.errors import install_hint
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.pipelining import server_time_ms
from millstream.testing.history import Event, check, read_events
from tests.support.commandline import PROGRAM, environment, run
from tests.support.masters import (
    GROUP,
    KEYS,
    PATIENT,
    STREAM,
    TOKEN,
    Master,
    MemoConsumer,
    holders,
    is_clean,
    publish,
)
from tests.support.processes import end
from tests.support.quick_programs import Program
from tests.support.requirements import skip_without
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.master, pytest.mark.faults]

EXAMPLE = Path(__file__).parents[2] / "examples/tickets"
WATCHFUL = ("--ping-interval", "0.5", "--ping-failures", "6")
"""Where a consumer is to be found dead, and no other that gets no processor for some seconds."""
STUCK = ("--delegation-limit", "6")
"""Where a consumer is to be found stuck, and none that looks for its message some seconds late."""


class RunningWorkers:
    """Consumers in processes of their own, and what they noted. A context manager, at whose end they are gone."""

    def __init__(self, url: str, folder: Path, masters: Sequence[Master]) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._url = url
        self._folder = folder
        self._masters = masters

    def __enter__(self) -> "RunningWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(FAIL_SAFE_S)

    def python(self, name: str, *options: str, work_ms: int = 5, function: str = f"{EXAMPLE}/work.py:work") -> None:
        """Start `millstream consumer`."""
        environ = environment(
            None,
            {
                "MILLSTREAM_CONSUMER_TICKET_STREAM": STREAM,
                "MILLSTREAM_CONSUMER_CONCURRENCY_STREAM_GROUP": GROUP,
                "MILLSTREAM_CONSUMER_NAME": name,
                "MILLSTREAM_MASTER_TOKEN": TOKEN,
                "TICKETS_LOG": str(self.log(name)),
                "WORK_MS": str(work_ms),
                "MILLSTREAM_CONSUMER_MASTER_REGISTER_API_URL": " ".join(
                    f"{one.url}/api/consumers/register" for one in self._masters
                ),
                "MILLSTREAM_CONSUMER_MASTER_ACKNOWLEDGE_API_URL": " ".join(
                    f"{one.url}/api/messages/acknowledge" for one in self._masters
                ),
            },
        )
        command = [*PROGRAM, "consumer", function, "--url", self._url, "--poll", "5ms", *options]
        self.processes[name] = Program(command, env=environ)

    def javascript(self, name: str, port: int, work_ms: int = 5) -> None:
        """Start the consumer in JavaScript."""
        arguments = (name, str(port), self._masters[0].url, TOKEN, STREAM, GROUP, str(self.log(name)))
        command = ["node", str(EXAMPLE / "consumer.js"), *arguments]
        self.processes[name] = subprocess.Popen(command, env={**os.environ, "WORK_MS": str(work_ms)})

    def log(self, name: str) -> Path:
        """Where a consumer notes what it does."""
        return self._folder / f"{name}.jsonl"

    def noted(self, name: str) -> int:
        """How many lines a consumer has noted."""
        return len(self.log(name).read_bytes().splitlines()) if self.log(name).exists() else 0

    def in_the_middle(self, name: str, client: Client, enqueued: list[Event]) -> None:
        """Wait until a consumer works on a message; publishes some more once all are done."""

        def works() -> bool:
            if is_clean(client):
                enqueued.extend(enqueue(client, 12, 2))
            lines = self.log(name).read_bytes().splitlines() if self.log(name).exists() else []
            return bool(lines) and b'"started"' in lines[-1]

        eventually(works, f"{name} at work")

    def judge(self, enqueued: Sequence[Event]) -> None:
        """Nothing lost, doubled, out of order or at the same time as another of its ticket."""
        check([*enqueued, *read_events(*self._folder.glob("*.jsonl"))]).raise_if_bad()


def enqueue(client: Client, tickets: int, each: int) -> list[Event]:
    """Publish messages of several tickets, mixed."""
    keys = [f"T{number}" for _ in range(each) for number in range(tickets)]
    ids = publish(client, *keys)
    return [Event(kind="enqueued", stream=STREAM, id=one, key=key.encode()) for one, key in zip(ids, keys, strict=True)]


def leases_are_over(client: Client) -> bool:
    """Whether all leases have ended, by the server's clock."""
    return not client.execute("ZCOUNT", KEYS.leases, server_time_ms(client), "+inf")


def registered(master: Master, count: int) -> None:
    eventually(lambda: len(master.get("consumers")["consumers"]) == count, f"{count} consumers")


def test_a_consumer_that_stops_answering_its_health_url_loses_its_messages_to_others(client: Client) -> None:
    first, second = publish(client, "A", "A")
    with ExitStack() as stack:
        master = stack.enter_context(Master(client.url, *WATCHFUL))
        ill = stack.enter_context(MemoConsumer(client, "c1").register(master))
        well = stack.enter_context(MemoConsumer(client, "c2"))
        assert ill.next()[0] == first
        well.register(master)
        ill.health.status = 503
        assert well.next()[0] == first
        assert not ill.read()
        assert ill.acknowledge(master, first).status_code == 409
        well.finish(master, first)
        assert well.next()[0] == second
        ill.health.status = 200
        eventually(lambda: master.state_of("c1") == "alive", "its recovery")
        publish(client, "B")
        ill.next()


def test_a_late_xack_of_a_former_owner_ends_the_message_for_the_current_owner(client: Client) -> None:
    first, second = publish(client, "A", "A")
    with ExitStack() as stack:
        master = stack.enter_context(Master(client.url, *WATCHFUL))
        late = stack.enter_context(MemoConsumer(client, "c1").register(master))
        other = stack.enter_context(MemoConsumer(client, "c2"))
        late.next()
        other.register(master)
        late.health.status = 503
        assert other.next()[0] == first
        assert late.xack(first) == 1  # XACK asks no master
        assert other.next()[0] == second
        assert other.acknowledge(master, first).json()["known"] is True
        assert late.acknowledge(master, first).status_code == 409
        other.finish(master, second)
    assert is_clean(client)


def test_a_healthy_consumer_that_is_stuck_loses_its_message_and_gets_no_more(client: Client) -> None:
    stuck_on, newer = publish(client, "A", "A")
    with ExitStack() as stack:
        master = stack.enter_context(Master(client.url, *PATIENT, *STUCK))
        stuck = stack.enter_context(MemoConsumer(client, "c1").register(master))
        other = stack.enter_context(MemoConsumer(client, "c2"))
        assert stuck.next()[0] == stuck_on
        eventually(lambda: (stuck.read(), master.state_of("c1") == "stuck")[1], "it is found out")
        publish(client, "B")
        other.register(master)
        got = []
        for _ in range(3):
            message_id, fields = other.next()
            got.append((fields["ticket_id"], message_id))
            other.finish(master, message_id)
        assert [one for ticket, one in got if ticket == "A"] == [stuck_on, newer]
        assert not stuck.read()
        refused = stuck.acknowledge(master, stuck_on)
        assert (refused.status_code, "'c2' has done it" in refused.json()["error"]) == (409, True)
        assert master.state_of("c1") == "alive"


def test_a_slow_consumer_that_is_alone_processes_nothing_twice(client: Client) -> None:
    slow, newer = publish(client, "A", "A")
    with (
        Master(client.url, *PATIENT, *STUCK) as master,
        MemoConsumer(client, "c1").register(master) as consumer,
    ):
        assert consumer.next()[0] == slow
        eventually(lambda: master.state_of("c1") == "stuck", "it is found out")
        assert consumer.xack(slow) == 1
        assert consumer.acknowledge(master, slow).json()["known"] is False
        # That call assigns it, or the delegation loop, for which the consumer is alive again from the call on.
        assert consumer.next()[0] == newer
        consumer.finish(master, newer)
    assert is_clean(client)


def test_a_message_that_kills_its_consumers_becomes_a_dead_letter(client: Client) -> None:
    bad, good = publish(client, "A", "A")
    with Master(client.url, *WATCHFUL, "--attempts", "2") as master:
        for name in ("c1", "c2"):
            victim = MemoConsumer(client, name).register(master)
            assert victim.next()[0] == bad
            victim.health.close()
            eventually(lambda name=name: master.state_of(name) == "dead", "its death")  # type: ignore[misc]
        with MemoConsumer(client, "c3").register(master) as survivor:
            assert survivor.next()[0] == good
    (letter,) = run("dlq", "list", "--json", url=client.url).json_lines()
    assert (letter["id"], letter["reason"]) == (bad, "crashed")
    assert letter["error"] == "lost its consumer 2 times: 2 x failed health checks"


def test_an_acknowledgement_may_go_to_any_master(client: Client) -> None:
    first, second = publish(client, "A", "A")
    with Master(client.url, *PATIENT) as one, Master(client.url, *PATIENT, "--name", "m2") as two:
        consumer = MemoConsumer(client, "c1").register(one)
        with consumer:
            assert consumer.next()[0] == first
            end(one.process, signal.SIGKILL)
            consumer.finish(two, first)
            assert consumer.next()[0] == second
            consumer.finish(two, second)
    assert is_clean(client)


def test_messages_stay_assigned_without_a_master_and_acknowledged_ones_are_done(client: Client) -> None:
    first, second, other = publish(client, "A", "A", "B")
    options = (*PATIENT, "--lease", "1")
    with Master(client.url, *options) as master:
        consumer = MemoConsumer(client, "c1", max_tickets=2).register(master)
        eventually(lambda: len(consumer.read()) == 2, "both tickets")
        end(master.process, signal.SIGKILL)
    consumer.xack(first)
    eventually(lambda: leases_are_over(client), "the end of its leases")
    assert dict(consumer.read()).keys() == {other}
    with Master(client.url, *options) as master, consumer:
        eventually(lambda: second in dict(consumer.read()), "the next one of A")
        assert first not in dict(consumer.read())
        for message_id in (second, other):
            consumer.finish(master, message_id)
    assert is_clean(client)


def test_an_outsider_that_keeps_polling_its_messages_loses_them_to_the_master_after_a_while(client: Client) -> None:
    client.execute("XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM")
    (old,) = publish(client, "A")
    began = time.monotonic()
    client.execute("XREADGROUP", "GROUP", GROUP, "thief", "STREAMS", STREAM, ">")
    with Master(client.url, "--min-idle", "1.5"):

        def polls() -> bool:
            client.execute("XREADGROUP", "GROUP", GROUP, "thief", "STREAMS", STREAM, "0")  # resets its idle time
            return holders(client) == {old: "waiting"}

        eventually(polls, "the message is in its line")
        assert time.monotonic() - began > 1.4


def test_messages_that_were_pending_before_there_was_a_master_are_not_lost(client: Client) -> None:
    client.execute("XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM")
    old = publish(client, "A", "B")
    client.execute("XREADGROUP", "GROUP", GROUP, "gone", "STREAMS", STREAM, ">")
    new = publish(client, "A")
    with Master(client.url, *PATIENT) as master, MemoConsumer(client, "c1", max_tickets=5).register(master) as consumer:
        eventually(lambda: set(holders(client).values()) <= {"c1", "waiting"}, "the old ones are in their lines")
        got: list[str] = []
        while len(got) < 3:
            message_id, _ = consumer.next()
            got.append(message_id)
            consumer.finish(master, message_id)
    # The newer one of A may have run before its elder was idle for long enough.
    assert sorted(got) == [*old, *new]
    assert is_clean(client)


def test_a_deleted_consumer_and_a_destroyed_group_lose_nothing(client: Client) -> None:
    first, second = publish(client, "A", "A")
    with Master(client.url, *PATIENT) as master, MemoConsumer(client, "c1").register(master) as consumer:
        assert consumer.next()[0] == first
        client.execute("XGROUP", "DELCONSUMER", STREAM, GROUP, "c1")
        eventually(lambda: holders(client) == {first: "c1", second: "waiting"}, "the message is back")
        client.execute("XGROUP", "DESTROY", STREAM, GROUP)
        eventually(lambda: client.execute("XINFO", "GROUPS", STREAM), "the group is back")
        eventually(lambda: holders(client) == {first: "c1", second: "waiting"}, "the messages are back")
        consumer.finish(master, first)
        consumer.finish(master, second)
    assert is_clean(client)


def test_tickets_stay_in_order_when_one_of_three_consumers_and_one_of_two_masters_are_killed(
    client: Client, tmp_path: Path
) -> None:
    with (
        Master(client.url, *WATCHFUL) as one,
        Master(client.url, *WATCHFUL, "--name", "m2") as two,
        RunningWorkers(client.url, tmp_path, [one, two]) as workers,
    ):
        for name in ("c1", "c2", "c3"):
            workers.python(name, "--max-tickets", "2", work_ms=30)
        registered(two, 3)
        enqueued = enqueue(client, 12, 8)
        workers.in_the_middle("c1", client, enqueued)
        end(one.process, signal.SIGKILL)
        workers.in_the_middle("c2", client, enqueued)
        end(workers.processes["c2"], signal.SIGKILL)
        eventually(lambda: is_clean(client), "all done")
    events = read_events(*tmp_path.glob("*.jsonl"))
    report = check([*enqueued, *events])
    # What the killed one had done and not acknowledged is done again: how many these are, the machine decides.
    assert not [*report.out_of_order, *report.overlapping, *report.lost]


def test_a_consumer_that_is_stopped_finishes_its_message_and_releases_the_rest(client: Client, tmp_path: Path) -> None:
    with (
        Master(client.url, *PATIENT) as master,
        RunningWorkers(client.url, tmp_path, [master]) as workers,
    ):
        workers.python("c1", work_ms=300)
        registered(master, 1)
        enqueued = enqueue(client, 3, 2)
        workers.in_the_middle("c1", client, enqueued)
        assert end(workers.processes["c1"]) == 0
        assert master.state_of("c1") is None
        assert "c1" not in holders(client).values()
        workers.python("c2")
        eventually(lambda: is_clean(client), "all done")
        workers.judge(enqueued)


def test_masters_and_consumers_continue_after_redis_restarts(
    millstream_fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    url = millstream_fresh_server.url
    with Client(url) as client, Master(url, *PATIENT) as master, RunningWorkers(url, tmp_path, [master]) as workers:
        workers.python("c1", "--max-tickets", "3", work_ms=20)
        registered(master, 1)
        enqueued = enqueue(client, 6, 20)
        workers.in_the_middle("c1", client, enqueued)
        millstream_fresh_server.restart()

        def done() -> bool:
            return bool(client.retry_while_unavailable(lambda: is_clean(client), what="the test"))

        eventually(done, "all done")
        workers.judge(enqueued)


def test_a_master_answers_health_checks_while_all_its_calls_wait_for_redis(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    with Master(millstream_fresh_server.url, *PATIENT) as master, ExitStack() as stack:
        parts = urlsplit(master.url)
        millstream_fresh_server.pause()
        stack.callback(millstream_fresh_server.resume)
        head = f"GET /api/consumers HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        for _ in range(80):
            call = stack.enter_context(socket.create_connection((parts.hostname, parts.port)))
            call.sendall(head.encode())
        for _ in range(3):
            answer = master.http.get("/api/health")
            assert answer.status_code in (200, 503)
            assert answer.json()["master"] == "master"


def test_a_consumer_reports_that_it_is_overdue_while_its_async_function_takes_too_long(
    client: Client, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio, pathlib\n\n\n"
        "async def work(message):\n"
        "    while not pathlib.Path(__file__).with_name('go').exists():\n"
        "        await asyncio.sleep(0.01)\n"
    )
    with Master(client.url, *PATIENT) as master, RunningWorkers(client.url, tmp_path, [master]) as workers:
        workers.python("c1", "--time-limit", "0.5", function=f"{tmp_path / 'slow.py'}:work")
        registered(master, 1)
        (only,) = publish(client, "A")
        health_url = master.get("consumers")["consumers"][0]["health_url"]

        def health() -> httpx.Response:
            return httpx.get(health_url, timeout=FAIL_SAFE_S, trust_env=False)

        eventually(lambda: health().status_code == 503, "it takes too long")
        assert health().json() == {"status": "failing", "consumer": "c1", "overdue": [only]}
        (tmp_path / "go").touch()
        eventually(lambda: is_clean(client), "it is done")
        eventually(lambda: health().status_code == 200, "it is well again")


def need_node() -> None:
    skip_without(shutil.which("node"), "node is not on PATH: apt-get install nodejs")


def test_a_consumer_in_javascript_shares_tickets_with_one_in_python(
    millstream_server: EmbeddedServer, client: Client, tmp_path: Path
) -> None:
    need_node()
    assert len((EXAMPLE / "consumer.js").read_text().splitlines()) < 60
    with Master(client.url, *PATIENT) as master, RunningWorkers(client.url, tmp_path, [master]) as workers:
        workers.javascript("js", millstream_server.port)
        workers.python("py")
        registered(master, 2)
        enqueued = enqueue(client, 8, 10)

        def both_did_much() -> bool:
            if is_clean(client):
                enqueued.extend(enqueue(client, 8, 2))
            return all(workers.noted(name) > 30 for name in ("js", "py"))

        eventually(both_did_much, "work of either")
        eventually(lambda: is_clean(client), "all done")
        workers.judge(enqueued)
    assert client.execute("HLEN", KEYS.crashes) == 0


def test_without_the_extra_the_example_prints_only_what_the_master_lacks(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['fastapi'] = None\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [PROGRAM[0], str(EXAMPLE / "run.py"), "1", "1"],
        env=environment(None, {"PYTHONPATH": path}),
        capture_output=True,
        text=True,
        timeout=FAIL_SAFE_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"error: this needs fastapi, which is not installed; {install_hint('master')}\n"


def test_the_example_shows_every_ticket_in_order() -> None:
    need_node()
    done = subprocess.run(
        [PROGRAM[0], str(EXAMPLE / "run.py"), "4", "6"],
        capture_output=True,
        text=True,
        timeout=FAIL_SAFE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nin order\n")
