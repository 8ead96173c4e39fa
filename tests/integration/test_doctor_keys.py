"""`millstream doctor` on keys of handlers that hold something else, and on workers that cannot continue for that."""

import pytest

from millstream.admin.doctor import diagnose
from millstream.delivery.reliable_stream import ReliableStream
from millstream.delivery.restarts import Restart, record_restart
from millstream.groups import Group
from millstream.redis_client.client import Client
from tests.support.commandline import call
from tests.support.findings import found, only
from tests.support.workers import KEYS, fill

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]


def test_a_stream_whose_name_holds_another_type_is_a_problem_and_its_handler_no_leftover(client: Client) -> None:
    ReliableStream(client, "in", app="app", handler="handle", consumer="w").join()
    client.execute("SET", "in", "x")
    finding = only(client, "unreadable")
    assert (finding.severity, finding.handler) == ("problem", "app.handle")
    assert finding.what == "in holds a string where app.handle needs a stream"
    assert finding.mend[0].endswith(" RENAME in NEW_NAME  # or delete that key")
    assert found(diagnose(client), "leftovers") == []
    shown = call("info", "app", "--wide", url=client.url)
    assert "app.handle on in is unreadable: in holds a string where a stream is needed: rename or delete" in shown.err
    assert "unreadable" in shown.out
    assert "unreadable" in call("info", "app", url=client.url).out
    assert "in holds a string where a stream is needed" in call("info", "app", url=client.url).err


def test_a_worker_that_cannot_continue_has_crashed_on_no_message(client: Client) -> None:
    ReliableStream(client, "in", app="app", handler="handle", consumer="w").join()
    cause = "ended with code 78, as it cannot continue: see its log"
    record_restart(client, "app", Restart(worker="w", incarnation="w-0", cause=cause))
    finding = only(client, "restarts")
    assert (finding.why or "").endswith(cause)
    assert finding.mend[0].startswith("millstream worker FILE.py")


def test_keys_of_the_wrong_type_are_a_problem(client: Client) -> None:
    fill(client, 1)
    Group(client, "in", KEYS.group).create()
    client.execute("SET", KEYS.meta, "x")
    assert only(client, "unreadable").severity == "problem"


@pytest.mark.parametrize("key", [KEYS.owners, KEYS.leases, KEYS.ready, KEYS.parked])
def test_a_key_of_the_key_queues_that_has_the_wrong_type_is_named(client: Client, key: str) -> None:
    fill(client, 1)
    Group(client, "in", KEYS.group).create()
    client.execute("SET", key, "x")
    finding = only(client, "unreadable")
    assert finding.what.startswith("app.handle: its keys on in are unreadable: ")
    assert [one.rpartition("TYPE ")[2].strip("'") for one in finding.mend] == [key]
