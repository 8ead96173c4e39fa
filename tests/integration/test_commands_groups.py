"""`millstream group`; and what `info` and `dlq` know of groups."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from millstream import App, Message, Reject
from millstream.admin.inspection import inspect
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.reliable_stream import ReliableStream
from millstream.groups import Consumer, Group
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import server_time_ms
from tests.support.commandline import call
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import LONG_AGO_MS, QUICK, working

pytestmark = [pytest.mark.cli, pytest.mark.groups]

KEYS = HandlerKeys("shop", "bill", "s")


def add(client: Client, count: int, stream: str = "s") -> None:
    """Add entries 1-0, 2-0, 3-0, ..."""
    client.pipeline([("XADD", stream, f"{number}-0", "n", number) for number in range(1, count + 1)])


def read_new(client: Client, name: str, count: int, group: str = "g") -> None:
    Consumer(client, group=group, name=name, streams=["s"]).read_new(count=count)


def idle(client: Client, idle_ms: int, *ids: str) -> None:
    """Have pending entries been left alone for so long."""
    for one in Group(client, "s", "g").pending.iter_entries():
        if not ids or one.id.decode() in ids:
            client.execute("XCLAIM", "s", "g", one.consumer, 0, one.id, "IDLE", idle_ms, "JUSTID")


@pytest.fixture
def group(client: Client) -> Group:
    """Ten entries; `a` holds 1-0 to 4-0, `b` holds 5-0 and 6-0."""
    add(client, 10)
    group = Group(client, "s", "g")
    group.create()
    read_new(client, "a", 4)
    read_new(client, "b", 2)
    return group


def holders(client: Client, group: str = "g") -> dict[str, str]:
    return {one.id.decode(): one.consumer for one in Group(client, "s", group).pending.iter_entries()}


# --- groups: looking ---


def test_groups_of_a_stream_are_listed(client: Client, group: Group) -> None:
    expected = {
        "stream": "s",
        "name": "g",
        "consumers": 2,
        "pending": 6,
        "last_delivered": "6-0",
        "entries_read": 6,
        "lag": 4,
        "engine": None,
    }
    assert call("group", "list", "s", "--json", url=client.url).json_lines() == [expected]
    heading, line = call("group", "list", "s", url=client.url).out.splitlines()
    assert line.split() == ["s", "g", "2", "6", "4", "6-0", "-"]
    assert heading.split()[:4] == ["stream", "group", "consumers", "pending"]


def test_groups_are_listed_by_pattern_with_the_handlers_among_them(client: Client, group: Group) -> None:
    ReliableStream(client, "s", app="shop", handler="bill", consumer="w").join()
    Group(client, "other", "h").create(mkstream=True)
    found = call("group", "list", "--pattern", "*", "--json", url=client.url).json_lines()
    assert [(one["stream"], one["name"], one["engine"]) for one in found] == [
        ("other", "h", None),
        ("s", "g", None),
        ("s", KEYS.group, "workers"),
    ]
    assert call("group", "list", "--pattern", "none*", url=client.url).err == "there are no groups\n"


def test_groups_to_list_are_named_by_stream_or_by_pattern_but_not_both(client: Client, group: Group) -> None:
    assert call("group", "list", url=client.url).code == 2
    assert call("group", "list", "s", "--pattern", "*", url=client.url).code == 2
    assert call("group", "list", "absent", url=client.url).code == 1
    assert "Commands" in call("group").out + call("group").err


def test_consumers_are_listed_with_their_pending_entries(client: Client, group: Group) -> None:
    found = call("group", "consumers", "s", "g", "--json", url=client.url).json_lines()
    assert [(one["name"], one["pending"]) for one in found] == [("a", 4), ("b", 2)]
    assert call("group", "consumers", "s", "g", url=client.url).out.splitlines()[1].split()[:2] == ["a", "4"]
    assert call("group", "consumers", "s", "absent", url=client.url).code == 1


@pytest.mark.parametrize(
    "words",
    [
        ("consumers", "s", "absent"),
        ("pending", "s", "absent"),
        ("claim", "s", "absent", "a", "1-0", "--create"),
        ("set-id", "s", "absent", "--after", "latest", "--yes"),
        ("delete", "s", "absent", "--yes"),
        ("delete-consumer", "s", "absent", "a", "--yes"),
        ("clean", "s", "absent", "--yes"),
    ],
)
def test_a_group_that_does_not_exist_is_named_with_the_command_that_lists_the_others(
    client: Client, group: Group, words: tuple[str, ...]
) -> None:
    ended = call("group", *words, url=client.url)
    assert (ended.code, ended.err) == (1, "error: there is no group 'absent' on s; see: millstream group list s\n")


# --- groups: changing ---


@pytest.mark.parametrize(("at", "given"), [("earliest", 10), ("latest", 0), ("7-0", 3)])
def test_a_group_is_created_once_at_the_given_id(client: Client, at: str, given: int) -> None:
    add(client, 10)
    assert call("group", "create", "s", "g", "--after", at, "--json", url=client.url).json()["created"]
    assert not call("group", "create", "s", "g", "--json", url=client.url).json()["created"]
    read_new(client, "a", 100)
    assert len(holders(client)) == given


def test_a_group_is_created_with_its_stream_only_with_the_option_for_it(client: Client) -> None:
    assert call("group", "create", "absent", "g", url=client.url).code == 1
    assert call("group", "create", "absent", "g", "--mkstream", url=client.url).code == 0
    assert client.execute("EXISTS", "absent") == 1


def test_a_group_moves_and_reports_its_former_id_but_does_not_move_in_a_dry_run(client: Client, group: Group) -> None:
    words = ("group", "set-id", "s", "g", "--after", "2-0", "--json")
    assert call(*words, "--dry-run", url=client.url).json()["now"] == "6-0"
    refusal = call(*words, url=client.url)
    assert (refusal.code, "--yes" in refusal.err) == (2, True)
    done = call(*words, "--yes", url=client.url).json()
    assert (done["before"], done["now"]) == ("6-0", "2-0")
    assert len(holders(client)) == 6
    assert call("group", "set-id", "s", "g", "--after", "soon", url=client.url).code == 2


def test_a_group_is_destroyed_after_a_question_that_counts_its_pending_entries(client: Client, group: Group) -> None:
    refusal = call("group", "delete", "s", "g", url=client.url)
    assert (refusal.code, "6 pending entries" in refusal.err) == (2, True)
    assert "would be" in call("group", "delete", "s", "g", "--dry-run", url=client.url).out
    assert group.info() is not None
    assert call("group", "delete", "s", "g", "--yes", "--json", url=client.url).json() == {
        "stream": "s",
        "group": "g",
        "pending": 6,
        "deleted": True,
        "dry_run": False,
    }
    assert group.info() is None
    assert call("group", "delete", "s", "g", "--yes", url=client.url).code == 1


def test_a_consumer_with_pending_entries_is_deleted_only_with_an_heir(client: Client, group: Group) -> None:
    words = ("group", "delete-consumer", "s", "g", "a", "--yes")
    refusal = call(*words, url=client.url)
    assert (refusal.code, "name the consumer that gets them" in refusal.err) == (2, True)
    assert call(*words, "--transfer-to", "absent", url=client.url).code == 2
    assert call(*words, "--transfer-to", "b", "--dry-run", url=client.url).code == 0
    assert len(holders(client)) == 6
    client.execute("XDEL", "s", "2-0")
    done = call(*words, "--transfer-to", "b", "--json", url=client.url).json()
    assert (done["pending"], done["moved"], done["gone"]) == (4, 3, ["2-0"])
    assert holders(client) == dict.fromkeys(("1-0", "3-0", "4-0", "5-0", "6-0"), "b")
    assert call(*words, url=client.url).code == 1


def test_idle_consumers_without_pending_entries_are_removed(client: Client, group: Group) -> None:
    group.create_consumer("c")
    group.create_consumer("d")
    words = ("group", "clean", "s", "--idle", "0s", "--json")
    assert call(*words, "--dry-run", url=client.url).json()["consumers"] == {"g": ["c", "d"]}
    assert call(*words, url=client.url).code == 2
    assert call("group", "clean", "s", "--json", url=client.url).json()["consumers"] == {"g": []}
    assert call(*words, "--yes", url=client.url).json()["consumers"] == {"g": ["c", "d"]}
    assert [one.name for one in group.consumers()] == ["a", "b"]


# --- pending ---


def test_pending_entries_are_summed_up_and_listed(client: Client, group: Group) -> None:
    assert call("group", "pending", "s", "g", "--count", "--json", url=client.url).json() == {
        "stream": "s",
        "group": "g",
        "count": 6,
        "lowest": "1-0",
        "highest": "6-0",
        "by_consumer": {"a": 4, "b": 2},
    }
    found = call("group", "pending", "s", "g", "--json", url=client.url).json_lines()
    assert [one["id"] for one in found] == [f"{n}-0" for n in range(1, 7)]
    assert set(found[0]) == {"stream", "group", "id", "consumer", "idle_ms", "deliveries"}
    lines = call("group", "pending", "s", "g", url=client.url).out.splitlines()
    assert lines[0] == "6 pending entries, from 1-0 to 6-0"
    assert lines[-1].split()[:2] == ["6-0", "b"]
    assert call("group", "pending", "s", "g", "--count", url=client.url).out.splitlines() == lines[:4]


def test_pending_entries_are_picked_by_consumer_idle_time_range_and_count(client: Client, group: Group) -> None:
    idle(client, 90_000, "2-0", "6-0")

    def ids(*options: str) -> list[str]:
        return [
            one["id"] for one in call("group", "pending", "s", "g", "--json", *options, url=client.url).json_lines()
        ]

    assert ids("--consumer", "b") == ["5-0", "6-0"]
    assert ids("--min-idle", "1m") == ["2-0", "6-0"]
    assert ids("--after", "2-0", "--to", "4-0") == ["3-0", "4-0"]
    assert ids("--from", "2-0", "--to", "4-0") == ["2-0", "3-0", "4-0"]
    assert ids("--limit", "2") == ["1-0", "2-0"]
    assert "there are more" in call("group", "pending", "s", "g", "--limit", "5", url=client.url).err
    assert "there are more" not in call("group", "pending", "s", "g", "--limit", "6", url=client.url).err
    group.ack([f"{n}-0" for n in range(1, 7)])
    assert call("group", "pending", "s", "g", url=client.url).err == "nothing is pending\n"
    assert call("group", "pending", "s", "absent", url=client.url).code == 1


# --- claim ---


def test_all_idle_entries_are_claimed_and_the_deleted_ones_are_named(client: Client) -> None:
    add(client, 1_600)
    Group(client, "s", "g").create()
    read_new(client, "a", 1_500)
    read_new(client, "b", 100)
    idle(client, 90_000)
    client.execute("XCLAIM", "s", "g", "a", 0, "7-0")
    client.execute("XDEL", "s", "3-0", "1400-0")
    words = ("group", "claim", "s", "g", "b", "--min-idle", "60s", "--yes", "--json")
    would = call(*words, "--dry-run", url=client.url).json()
    assert set(holders(client).values()) == {"a", "b"}
    done = call(*words, url=client.url).json()
    assert (len(done["claimed"]), done["deleted"]) == (1_597, ["3-0", "1400-0"])
    assert (would["claimed"], would["deleted"]) == (done["claimed"], done["deleted"])
    assert [one for one, holder in holders(client).items() if holder == "a"] == ["7-0"]
    assert {one.deliveries for one in Group(client, "s", "g").pending.iter_entries(consumer="b")} == {1}
    assert call(*words, url=client.url).json()["claimed"] == []


def test_entries_are_claimed_by_id_and_the_others_are_reported_by_cause(client: Client, group: Group) -> None:
    idle(client, 90_000, "1-0", "2-0")
    client.execute("XDEL", "s", "2-0")
    words = ("group", "claim", "s", "g", "b", "1-0", "2-0", "3-0", "9-0", "--min-idle", "1m", "--json")
    expected = {"claimed": ["1-0"], "deleted": ["2-0"], "not_idle": ["3-0"], "not_pending": ["9-0"]}
    would = call(*words, "--dry-run", url=client.url)
    assert holders(client)["1-0"] == "a"
    outcome = call(*words, url=client.url)
    assert outcome.code == would.code == 1
    assert outcome.json() == {"consumer": "b", **expected, "dry_run": False}
    assert would.json() == {"consumer": "b", **expected, "dry_run": True}
    assert holders(client) == {"1-0": "b", "3-0": "a", "4-0": "a", "5-0": "b", "6-0": "b"}
    spoken = call("group", "claim", "s", "g", "b", "3-0", "9-0", url=client.url)
    assert (spoken.out, spoken.err) == ("1 entry claimed for b\n", "9-0 is not pending\n")


def test_a_claim_without_a_consumer_or_without_ids_is_refused(client: Client, group: Group) -> None:
    refusal = call("group", "claim", "s", "g", "c", "1-0", url=client.url)
    assert (refusal.code, "--create" in refusal.err) == (1, True)
    assert call("group", "claim", "s", "g", "b", url=client.url).code == 2
    assert call("group", "claim", "s", "g", "b", "nonsense", url=client.url).code == 2
    assert set(holders(client).values()) == {"a", "b"}
    assert call("group", "claim", "s", "g", "c", "1-0", "--create", url=client.url).code == 0
    assert holders(client)["1-0"] == "c"


# --- The groups of handlers ---


class Bill:
    """The handler shop.bill. It stops at some messages until the test lets it go on, and refuses 13 unless it is `lucky`."""

    def __init__(self, *stops: int) -> None:
        self.seen: list[int] = []
        self.lucky = False
        self._stops = {number: threading.Event() for number in stops}

    def bill(self, message: Message) -> dict[str, int]:
        """Give the number of the message."""
        number = int(message.text("n") or 0)
        self.seen.append(number)
        if number in self._stops:
            assert self._stops[number].wait(FAIL_SAFE_S)
        if number == 13 and not self.lucky:
            raise Reject("unlucky")
        return {"n": number}

    @contextmanager
    def stopped_at(self, number: int) -> Iterator[None]:
        """Once it works on this message; at the end it goes on."""
        eventually(lambda: number in self.seen, f"message {number} to be worked on")
        try:
            yield
        finally:
            self._stops[number].set()


@contextmanager
def billing(client: Client, *stops: int, claim_ms: int = LONG_AGO_MS) -> Iterator[Bill]:
    """A worker of shop.bill works meanwhile."""
    app, bill = App("shop"), Bill(*stops)
    app.handler("s", into="out", name="bill")(bill.bill)
    policy = replace(QUICK, claim_ms=claim_ms, threads=1)
    with working(client, app.handlers["bill"], "w", policy=policy):
        yield bill


def outputs(client: Client) -> list[int]:
    return sorted(int(pairs[1]) for _, pairs in client.execute("XRANGE", "out", "-", "+"))


def wait_for_outputs(client: Client, count: int) -> None:
    eventually(lambda: client.execute("XLEN", "out") >= count, f"{count} outputs")


@pytest.mark.parametrize(
    "words", [("create",), ("set-id", "--after", "earliest", "--yes"), ("set-id", "--after", "latest")]
)
def test_a_handlers_group_cannot_be_moved_and_the_error_names_the_option_that_can(
    client: Client, words: tuple[str, ...]
) -> None:
    add(client, 5)
    ReliableStream(client, "s", app="shop", handler="bill", consumer="w").join()
    refusal = call("group", words[0], "s", KEYS.group, *words[1:], url=client.url)
    assert refusal.code == 2
    assert "shop.bill" in refusal.err
    assert ("--start" if words[0] == "create" else "--reprocess") in refusal.err
    assert call("group", "list", "s", "--json", url=client.url).json()["last_delivered"] == "0-0"


def test_destroying_the_group_of_a_running_handler_loses_and_doubles_nothing(client: Client) -> None:
    add(client, 400)
    with billing(client, 50, 200) as bill:
        for number in (50, 200):
            with bill.stopped_at(number):
                outcome = call("group", "delete", "s", KEYS.group, "--yes", url=client.url)
                assert outcome.code == 0, outcome.err
                assert "will continue after its committed id" in outcome.err
        wait_for_outputs(client, 399)
    assert outputs(client) == [n for n in range(1, 401) if n != 13]


def test_a_handlers_group_without_a_committed_offset_is_not_destroyed_as_it_would_start_again(client: Client) -> None:
    add(client, 5)
    Group(client, "s", KEYS.group).create("3-0")
    refusal = call("group", "delete", "s", KEYS.group, "--yes", url=client.url)
    assert (refusal.code, "start again from the beginning" in refusal.err) == (2, True)
    assert Group(client, "s", KEYS.group).info() is not None


def test_entries_that_an_operator_claims_from_a_worker_are_committed_once(client: Client) -> None:
    add(client, 200)
    with billing(client, 20, claim_ms=300) as bill:
        with bill.stopped_at(20):
            outcome = call(
                "group",
                "claim",
                "s",
                KEYS.group,
                "x",
                "--min-idle",
                "0s",
                "--create",
                "--yes",
                "--json",
                url=client.url,
            )
            assert "20-0" in outcome.json()["claimed"]
            assert "claim idle entries by themselves" in outcome.err
        wait_for_outputs(client, 199)
        call("group", "delete-consumer", "s", KEYS.group, "x", "--transfer-to", "w", "--yes", url=client.url)
    assert outputs(client) == [n for n in range(1, 201) if n != 13]
    assert set(bill.seen) == set(range(1, 201))


def test_info_shows_the_entries_that_workers_have_in_flight(client: Client) -> None:
    now_ms = server_time_ms(client)
    stream = ReliableStream(client, "s", app="shop", handler="bill", consumer="w")
    stream.join()
    for age_s in (90, 80, 70, 60, 50, 40):
        client.execute("XADD", "s", f"{now_ms - age_s * 1_000}-0", "n", age_s)
    found = stream.fetch(count=4)
    stream.ack(found[0])
    stream.checkpoint()
    (handler,) = inspect(client).handlers
    later_ms = server_time_ms(client) - now_ms
    assert (handler.engine, handler.consumers, handler.pending) == ("workers", 1, 3)
    assert (handler.lag, handler.lag_exact) == (5, True)  # three in flight, two waiting
    assert handler.committed_id == f"{now_ms - 60_000}-0"
    assert handler.oldest_age_ms == handler.oldest_pending_age_ms
    assert 80_000 <= (handler.oldest_pending_age_ms or 0) <= 80_000 + later_ms
    assert call("info", "--json", url=client.url).json()["handlers"][0]["pending"] == 3
    assert "workers (1)" in call("info", "--wide", url=client.url).out
    stream.ack(*found[1:])
    (handler,) = inspect(client).handlers
    assert (handler.pending, handler.lag, handler.oldest_pending_age_ms) == (0, 2, None)


def test_info_shows_that_a_handler_has_moved_to_spark(client: Client) -> None:
    add(client, 5)
    stream = ReliableStream(client, "s", app="shop", handler="bill", consumer="w")
    stream.join()
    stream.ack(*stream.fetch(count=2))
    store = CommitStore(client, app="shop", handler="bill")
    store.with_token(store.new_token(["s"])).begin_run(["s"])
    (handler,) = inspect(client).handlers
    assert (handler.engine, handler.consumers, handler.pending, handler.lag) == ("spark", 0, 0, 3)


def test_a_dead_letter_of_a_worker_is_listed_and_redriven_once(client: Client) -> None:
    add(client, 150)
    with billing(client) as bill:
        wait_for_outputs(client, 149)
        eventually(lambda: client.execute("XLEN", KEYS.dead_letters) == 1, "the dead letter")
        bill.lucky = True
        (letter,) = call("dlq", "list", "--json", url=client.url).json_lines()
        assert (letter["handler"], letter["id"], letter["reason"]) == ("bill", "13-0", "rejected")
        assert call("dlq", "redrive", "--all", "--yes", "--json", url=client.url).json()["redriven"] == 1
        wait_for_outputs(client, 150)
    assert outputs(client) == list(range(1, 151))
    assert call("dlq", "list", "--json", url=client.url).json_lines() == []
