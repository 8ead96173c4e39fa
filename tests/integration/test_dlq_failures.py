"""A redrive or a purge that fails midway: its record, and its command, say how many dead letters it had come to."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from millstream.admin.audit_log import AuditLog
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue, DeadLetterRef, Redriven
from millstream.errors import AccessDenied, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from tests.support.commandline import call
from tests.support.consoles import console
from tests.support.dead_letters import KEYS, add_dead_letter, entries, left
from tests.support.deployments import lent_cluster

pytestmark = [pytest.mark.cli]

REFUNDS = HandlerKeys("shop", "pay", "refunds")


@pytest.fixture
def refusing(millstream_fresh_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """On a Redis that refuses scripts and deletions once a redrive or a purge has made its first step."""
    server = millstream_fresh_server
    redrive, purge = DeadLetterQueue.redrive, DeadLetterQueue.purge

    def refuse() -> None:
        server.call("ACL", "SETUSER", "default", "-evalsha", "-eval", "-xdel")

    def refused_redrive(queue: DeadLetterQueue, refs: Sequence[DeadLetterRef]) -> Iterator[Redriven]:
        for number, one in enumerate(redrive(queue, refs), 1):
            if number == 50:
                refuse()
            yield one

    def refused_purge(
        queue: DeadLetterQueue, refs: Sequence[DeadLetterRef], *, on_removed: Callable[[int], None]
    ) -> int:
        def removed(number: int) -> None:
            on_removed(number)
            refuse()

        return purge(queue, refs, on_removed=removed)

    monkeypatch.setattr(DeadLetterQueue, "redrive", refused_redrive)
    monkeypatch.setattr(DeadLetterQueue, "purge", refused_purge)
    with Client(server.url) as opened:
        opened.execute("HSET", KEYS.meta, "owner", "workers")
        yield opened


def add(client: Client, count: int, keys: HandlerKeys = KEYS) -> None:
    for number in range(count):
        add_dead_letter(client, [b"n", b"%d" % number], keys=keys)


@pytest.mark.parametrize(("verb", "done"), [("redrive", 50), ("purge", 500)])
def test_the_record_of_a_form_that_fails_midway_says_how_many_it_had_come_to(
    refusing: Client, tmp_path: Path, verb: str, done: int
) -> None:
    add(refusing, done + 10)
    with console(refusing.url, tmp_path, "admin") as browser:
        question = browser.send(browser.get("/letters?handler=shop.pay"), f"/letters/{verb}")
        confirm = {"confirm": str(done + 10)} if verb == "purge" else {}
        assert browser.send(question, f"/letters/{verb}", **confirm).status == 503
    assert_recorded(refusing, verb, done)


@pytest.mark.parametrize(("verb", "done"), [("redrive", 50), ("purge", 50)])
def test_the_record_of_a_command_that_fails_midway_says_how_many_it_had_come_to(
    refusing: Client, verb: str, done: int
) -> None:
    add(refusing, done + 10)
    failed = call("dlq", verb, "--all", "--yes", url=refusing.url)
    assert failed.code == 3
    assert f"{done} of {done + 10} {verb}" in failed.err
    assert_recorded(refusing, verb, done)


def assert_recorded(client: Client, verb: str, done: int) -> None:
    (record,) = AuditLog(client).read()
    assert (record.action, left(client)) == (f"dlq {verb}", 10)
    result = str(record.result)
    assert result.startswith("failed: ")
    assert result.endswith(f"; {done} of {done + 10} {verb}{'d' if verb == 'purge' else 'n'} before")


def on_orders_and_refunds(client: Client) -> list[DeadLetterRef]:
    """The references to two dead letters on each of two streams; those on `refunds` come first."""
    add(client, 2)
    add(client, 2, REFUNDS)
    queue = DeadLetterQueue(client)
    (first, second), (third, fourth) = (
        [entry.ref for entry in queue.read_after(one, "0", 10)] for one in (KEYS, REFUNDS)
    )
    return [third, fourth, first, second]


def test_a_redrive_yields_all_that_it_has_redriven_before_it_raises(request: pytest.FixtureRequest) -> None:
    deployed = lent_cluster(request)
    with Client(deployed.url) as client:
        refs = on_orders_and_refunds(client)
        owner = next(one for one in deployed.nodes if holds(one, REFUNDS.dead_letters))
        assert not holds(owner, KEYS.dead_letters), "another node"
        redriven: list[Redriven] = []
        owner.call("ACL", "SETUSER", "default", "-evalsha", "-eval")
        try:
            with pytest.raises(AccessDenied):
                redriven.extend(DeadLetterQueue(client).redrive(refs))
        finally:
            owner.call("ACL", "SETUSER", "default", "+evalsha", "+eval")
        assert [one.ref for one in redriven] == refs[2:]
        assert (len(entries(client)), left(client)) == (2, 0)


def holds(node: EmbeddedServer, name: str) -> bool:
    """Whether a node of a cluster has this key."""
    return name.encode() in node.call("KEYS", "*")


def test_a_purge_deletes_at_once_and_returns_how_many_were_there(client: Client) -> None:
    add(client, 1_100)
    refs = DeadLetterQueue(client).select(DeadLetterFilter(app="shop"))
    client.execute("XDEL", KEYS.dead_letters, refs[0].letter_id)
    assert (DeadLetterQueue(client).purge(refs), left(client)) == (1_099, 0)


def test_a_redrive_does_nothing_until_it_is_iterated(client: Client) -> None:
    add(client, 1)
    outcomes = DeadLetterQueue(client).redrive(DeadLetterQueue(client).select(DeadLetterFilter(app="shop")))
    assert (entries(client), left(client)) == ([], 1)
    assert (len(list(outcomes)), len(entries(client)), left(client)) == (1, 1, 0)


def test_a_purge_reports_all_that_it_has_purged_before_it_raises(client: Client) -> None:
    refs = on_orders_and_refunds(client)
    client.execute("SET", REFUNDS.dead_letters, "of another program")
    purged: list[int] = []
    with pytest.raises(WrongType):
        DeadLetterQueue(client).purge(refs, on_removed=purged.append)
    assert (purged, left(client)) == ([2], 0)
