"""A consumer group, operation by operation, against a real redis-server."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from millstream.errors import CommandFailed, ConfigError, GroupMissing, Unavailable, WrongType
from millstream.groups import (
    BEGINNING,
    END,
    ClaimOptions,
    Consumer,
    Delivered,
    Group,
    PendingSummary,
    delete_if_empty,
    groups_of,
    stream_details,
    stream_info,
)
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.pipelining import server_time_ms
from tests.support.deployments import lent_cluster
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.groups]

HOUR_MS = 3_600_000
LONGER_THAN_A_TEST_MS = 4_000_000


@pytest.fixture
def group(client: Client) -> Group:
    """A group from the beginning of a stream of nine entries, 1-0 to 9-0."""
    add(client, "s", range(1, 10))
    group = Group(client, "s", "g")
    group.create()
    return group


def add(client: Client, stream: str, numbers: range) -> None:
    for n in numbers:
        client.execute("XADD", stream, f"{n}-0", "n", n)


def consumer(client: Client, name: str = "c", *streams: str) -> Consumer:
    return Consumer(client, group="g", name=name, streams=streams or ("s",))


def read_new(client: Client, name: str = "c", count: int = 100) -> list[bytes]:
    return [one for batch in consumer(client, name).read_new(count=count) for one in batch.ids]


def since(client: Client, before_ms: int) -> int:
    """Milliseconds that have passed on that clock, at most."""
    return server_time_ms(client) - before_ms + 1


def ids(*numbers: int) -> list[bytes]:
    return [b"%d-0" % n for n in numbers]


# Creating, moving and destroying


@pytest.mark.parametrize(
    ("at", "expected"), [(BEGINNING, ids(1, 2, 3)), (END, []), ("2", ids(3)), (EntryId(1, 0), ids(2, 3))]
)
def test_a_group_begins_after_the_id_at_which_it_is_created(
    client: Client, at: str | EntryId, expected: list[bytes]
) -> None:
    add(client, "s", range(1, 4))
    assert Group(client, "s", "g").create(at)
    assert read_new(client) == expected


def test_creating_a_group_again_changes_nothing_and_reports_it(client: Client, group: Group) -> None:
    read_new(client, count=3)
    assert group.create(END) is False
    assert read_new(client, count=1) == ids(4)


def test_a_group_needs_a_stream_unless_it_may_create_one(client: Client) -> None:
    group = Group(client, "s", "g")
    with pytest.raises(GroupMissing, match="no stream 's'"):
        group.create()
    assert group.create(END, mkstream=True)
    assert read_new(client) == []


def test_an_invalid_id_is_refused(client: Client, group: Group) -> None:
    with pytest.raises(CommandFailed, match="Invalid stream ID"):
        Group(client, "s", "h").create("nonsense")


def test_the_error_names_a_key_of_another_type(client: Client) -> None:
    client.execute("SET", "s", "text")
    with pytest.raises(WrongType, match="s is not a stream"):
        Group(client, "s", "g").create()


def test_a_group_moved_back_delivers_again_and_one_moved_forward_skips(client: Client, group: Group) -> None:
    assert len(read_new(client)) == 9
    group.set_id("7-0", entries_read=7)
    assert groups_of(client, "s")[0].entries_read == 7
    assert read_new(client) == ids(8, 9)
    group.set_id(END)
    assert read_new(client) == []
    assert group.pending.summary().count == 9


def test_a_destroyed_group_is_gone_with_its_pending_entries(client: Client, group: Group) -> None:
    read_new(client)
    assert group.destroy()
    assert not group.destroy()
    assert group.info() is None
    for lost in (group.consumers, group.pending.summary, lambda: group.set_id("0"), lambda: read_new(client)):
        with pytest.raises(GroupMissing):
            lost()
    client.execute("DEL", "s")
    for gone in (group.destroy, group.info, group.consumers, lambda: group.set_id("0")):
        with pytest.raises(GroupMissing):
            gone()


def test_a_waiting_consumer_gets_an_error_when_its_group_is_destroyed(client: Client, group: Group) -> None:
    read_new(client)
    with Client(client.url, timeout_ms=LONGER_THAN_A_TEST_MS) as waiting, ThreadPoolExecutor() as pool:
        reading = pool.submit(consumer(waiting).read_new, block_ms=LONGER_THAN_A_TEST_MS - 1)
        eventually(lambda: b"blocked_clients:1" in client.execute("INFO", "clients"), "it to wait")
        assert group.destroy()
        with pytest.raises(GroupMissing):
            reading.result(FAIL_SAFE_S)


def test_a_destroyed_group_acknowledges_nothing(client: Client, group: Group) -> None:
    read_new(client)
    assert group.destroy()
    assert (group.ack(ids(1)), consumer(client).ack("s", ids(1))) == (0, 0)


def test_the_information_about_a_stream_is_complete(client: Client, group: Group) -> None:
    client.execute("XDEL", "s", "1-0", "4-0")
    info = stream_info(client, "s")
    assert (info.length, info.entries_added, info.groups) == (7, 9, 1)
    assert (info.first_id, info.last_id, info.max_deleted_id) == (b"2-0", b"9-0", b"4-0")
    assert info.first == Delivered(b"2-0", [b"n", b"2"], 0)
    assert info.last == Delivered(b"9-0", [b"n", b"9"], 0)
    assert (info.radix_tree_keys, info.radix_tree_nodes) == (1, 2)
    client.execute("XTRIM", "s", "MAXLEN", 0)
    empty = stream_info(client, "s")
    assert (empty.length, empty.last_id, empty.first, empty.last) == (0, b"9-0", None, None)


def test_a_stream_is_shown_with_its_groups_consumers_and_pending_entries_at_one_moment(
    client: Client, group: Group
) -> None:
    before_ms = server_time_ms(client)
    read_new(client, "a", count=2)
    read_new(client, "b", count=3)
    Group(client, "s", "\udcff").create("5-0")
    found = stream_details(client, "s", count=2)
    assert (found.length, found.last_id, found.first_id, found.entries_added) == (9, b"9-0", b"1-0", 9)
    assert found.entries == [Delivered(b"1-0", [b"n", b"1"], 0), Delivered(b"2-0", [b"n", b"2"], 0)]
    mine, other = found.groups
    assert (mine.name, mine.last_delivered, mine.entries_read, mine.lag, mine.pending) == ("g", b"5-0", 5, 4, 5)
    assert [(one.id, one.consumer, one.deliveries) for one in mine.held] == [(b"1-0", "a", 1), (b"2-0", "a", 1)]
    assert (other.name, other.last_delivered, other.pending, other.consumers) == ("\udcff", b"5-0", 0, [])
    first, second = mine.consumers
    assert (first.name, first.pending, second.name, second.pending) == ("a", 2, "b", 3)
    assert [(one.id, one.consumer, one.deliveries) for one in second.held] == [(b"3-0", "b", 1), (b"4-0", "b", 1)]
    assert all(one.since_ms >= before_ms for one in (*mine.held, *second.held))
    assert first.seen_ms >= before_ms


def test_a_missing_stream_and_a_key_of_another_type_are_distinguished(client: Client) -> None:
    client.execute("SET", "text", "1")
    for read in (stream_info, stream_details):
        with pytest.raises(GroupMissing, match="no stream 'none'"):
            read(client, "none")
        with pytest.raises(WrongType, match="text is not a stream"):
            read(client, "text")


def test_the_information_about_the_groups_of_a_stream_is_complete(client: Client, group: Group) -> None:
    Group(client, "s", "G").create("5-0")
    read_new(client, count=4)
    group.ack(ids(1))
    by_name = {info.name: info for info in groups_of(client, "s")}
    assert set(by_name) == {"g", "G"}  # names are case-sensitive
    mine = by_name["g"]
    assert (mine.consumers, mine.pending, mine.last_delivered, mine.entries_read, mine.lag) == (1, 3, b"4-0", 4, 5)
    assert by_name["G"].lag is None  # in mid-stream Redis cannot say


# Reading


def test_every_entry_goes_to_one_consumer_in_order(client: Client, group: Group) -> None:
    delivered = [read_new(client, name, count=2) for name in ("a", "b", "a", "b", "a")]
    assert [one for batch in delivered for one in batch] == ids(*range(1, 10))


def test_several_streams_are_read_in_one_call_each_with_its_own_batch(client: Client, group: Group) -> None:
    add(client, "t", range(1, 3))
    Group(client, "t", "g").create()
    batches = consumer(client, "c", "s", "t").read_new(count=2)
    assert [(batch.stream, batch.ids, batch.recovered) for batch in batches] == [
        ("s", ids(1, 2), False),
        ("t", ids(1, 2), False),
    ]
    again = consumer(client, "c", "s", "t").read_pending(after={"s": "1-0", "t": "0"})
    assert [(batch.stream, batch.ids) for batch in again] == [("s", ids(2)), ("t", ids(1, 2))]
    assert [batch.stream for batch in consumer(client, "c", "s", "t").read_pending(after={"t": "0"})] == ["t"]


def test_a_long_poll_returns_with_the_first_entry_and_empty_when_its_time_is_over(client: Client, group: Group) -> None:
    read_new(client)
    began = time.monotonic()
    assert consumer(client).read_new(block_ms=200) == []
    assert time.monotonic() - began >= 0.15, "Redis counts from when it woke up to read the command"

    def publish() -> None:
        eventually(lambda: b"blocked_clients:1" in client.execute("INFO", "clients"), "the reader to wait")
        client.execute("XADD", "s", "10-0", "n", 10)

    thread = threading.Thread(target=publish)
    thread.start()
    # But for the entry, it would wait for an hour.
    with Client(client.url, timeout_ms=2 * HOUR_MS) as patient:
        (batch,) = consumer(patient).read_new(block_ms=HOUR_MS)
    thread.join()
    assert batch.ids == ids(10)


def test_reading_with_noack_makes_nothing_pending(client: Client, group: Group) -> None:
    (batch,) = consumer(client).read_new(noack=True)
    assert len(batch) == 9
    assert group.pending.summary() == PendingSummary(0, None, None, {})


def test_a_restarted_consumer_reads_its_own_pending_entries_from_any_id(client: Client, group: Group) -> None:
    read_new(client, "c", count=4)
    read_new(client, "other", count=2)
    group.ack(ids(3))
    restarted = consumer(client)
    (batch,) = restarted.read_pending()
    assert (batch.ids, batch.recovered) == (ids(1, 2, 4), True)
    assert [entry.fields["n"] for entry in batch] == [b"1", b"2", b"4"]
    assert restarted.read_pending(after="1-0", count=1)[0].ids == ids(2)
    assert restarted.read_pending(after=EntryId(4, 0))[0].ids == []


def test_reading_again_counts_a_delivery_and_resets_the_idle_time(client: Client, group: Group) -> None:
    (entry_id,) = read_new(client, count=1)
    group.pending.claim_ids([entry_id], consumer="c", min_idle_ms=0, options=ClaimOptions(idle_ms=90_000))
    before_ms = server_time_ms(client)
    consumer(client).read_pending()
    (entry,) = group.pending.entries()
    assert entry.deliveries == 2
    assert entry.idle_ms <= since(client, before_ms)


def test_entries_trimmed_while_pending_are_distinguished_when_read_again(client: Client, group: Group) -> None:
    read_new(client)
    client.execute("XDEL", "s", "2-0")
    client.execute("XTRIM", "s", "MINID", "2-0")
    (batch,) = consumer(client).read_pending()
    assert batch.gone == ids(1, 2)
    assert batch.ids == ids(3, 4, 5, 6, 7, 8, 9)


def test_many_entries_are_acknowledged_at_once_and_only_once(client: Client, group: Group) -> None:
    client.pipeline([("XADD", "s", "*", "n", n) for n in range(20_000)])
    delivered = read_new(client, count=30_000)
    assert group.ack(delivered) == 20_009
    assert group.ack(delivered) == 0
    assert group.ack([]) == 0
    assert consumer(client).ack("s", []) == 0
    assert consumer(client).read_pending()[0].ids == []


# Looking at what is pending


def test_the_pending_entries_list_is_summed_up_by_consumer(client: Client, group: Group) -> None:
    read_new(client, "a", count=3)
    read_new(client, "b", count=1)
    summary = group.pending.summary()
    assert (summary.count, summary.lowest, summary.highest) == (4, b"1-0", b"4-0")
    assert summary.by_consumer == {"a": 3, "b": 1}


def test_pending_entries_are_filtered_by_range_count_consumer_and_idle_time(client: Client, group: Group) -> None:
    pending = group.pending
    before_ms = server_time_ms(client)
    pending.claim_ids(read_new(client, "a", count=3), consumer="a", min_idle_ms=0, options=ClaimOptions(idle_ms=90_000))
    read_new(client, "b", count=3)
    assert [one.id for one in pending.entries("2-0", "5-0")] == ids(2, 3, 4, 5)
    assert [one.id for one in pending.entries(EntryId(2, 0), count=1)] == ids(2)
    assert [one.id for one in pending.entries(consumer="b")] == ids(4, 5, 6)
    assert [one.id for one in pending.entries(min_idle_ms=60_000)] == ids(1, 2, 3)
    assert pending.entries(consumer="b", min_idle_ms=60_000) == []
    first = pending.entries(count=1)[0]
    assert (first.consumer, first.deliveries) == ("a", 1)
    assert 90_000 <= first.idle_ms <= 90_000 + since(client, before_ms)


def test_a_pending_entries_list_of_any_length_is_read_page_by_page(client: Client, group: Group) -> None:
    read_new(client, "a", count=4)
    read_new(client, "b", count=5)
    assert [one.id for one in group.pending.iter_entries(page=2)] == ids(*range(1, 10))
    assert [one.id for one in group.pending.iter_entries(page=2, consumer="b")] == ids(5, 6, 7, 8, 9)


# Claiming


def test_one_of_two_consumers_that_claim_the_same_entry_gets_it(client: Client, group: Group) -> None:
    delivered = read_new(client, "dead", count=2)
    group.pending.claim_ids(delivered, consumer="dead", min_idle_ms=0, options=ClaimOptions(idle_ms=HOUR_MS))
    before_ms = server_time_ms(client)
    first = group.pending.claim(ids(1, 2), consumer="a", min_idle_ms=HOUR_MS)
    second = group.pending.claim(ids(1, 2), consumer="b", min_idle_ms=HOUR_MS)
    assert (first.ids, first.recovered, second.ids) == (ids(1, 2), True, [])
    entry = group.pending.entries()[0]
    assert (entry.consumer, entry.deliveries) == ("a", 2)
    assert entry.idle_ms <= since(client, before_ms)
    assert group.pending.claim([], consumer="a", min_idle_ms=0).ids == []


def test_the_former_owner_does_not_read_a_claimed_entry_again(client: Client, group: Group) -> None:
    read_new(client, "dead", count=1)
    group.pending.claim(ids(1), consumer="a", min_idle_ms=0)
    assert consumer(client, "dead").read_pending()[0].ids == []


def test_a_claim_of_ids_alone_counts_no_delivery(client: Client, group: Group) -> None:
    read_new(client, "dead", count=1)
    assert group.pending.claim_ids(ids(1), consumer="a", min_idle_ms=0) == ids(1)
    assert group.pending.entries()[0].deliveries == 1


def test_a_claim_sets_idle_time_and_delivery_count_when_asked(client: Client, group: Group) -> None:
    read_new(client, "dead", count=2)
    before_ms = server_time_ms(client)
    group.pending.claim(ids(1), consumer="a", min_idle_ms=0, options=ClaimOptions(idle_ms=90_000, deliveries=7))
    earlier = ClaimOptions(time_ms=before_ms - 200_000)
    group.pending.claim(ids(2), consumer="a", min_idle_ms=0, options=earlier)
    first, second = group.pending.entries()
    assert first.deliveries == 7
    passed_ms = since(client, before_ms)
    assert 90_000 <= first.idle_ms <= 90_000 + passed_ms
    assert 200_000 <= second.idle_ms <= 200_000 + passed_ms


def test_a_claim_moves_the_group_forward_when_asked_and_never_back(client: Client, group: Group) -> None:
    read_new(client, count=1)
    for last_id in ("4-0", EntryId(3, 0)):
        group.pending.claim_ids(ids(1), consumer="d", min_idle_ms=0, options=ClaimOptions(last_id=last_id))
    assert groups_of(client, "s")[0].last_delivered == b"4-0"
    assert read_new(client, count=1) == ids(5)


def test_delivery_counts_are_known_for_pending_entries_only(client: Client, group: Group) -> None:
    read_new(client, count=3)
    consumer(client).read_pending(after="1")
    group.ack(ids(3))
    assert group.pending.delivery_counts(ids(1, 2, 3, 4)) == {b"1-0": 1, b"2-0": 2}
    assert group.pending.delivery_counts([]) == {}


def test_only_a_forced_claim_gets_an_entry_that_is_not_pending(client: Client, group: Group) -> None:
    group.set_id("9-0")
    assert group.pending.claim(ids(4), consumer="a", min_idle_ms=0).ids == []
    assert group.pending.claim(ids(4), consumer="a", min_idle_ms=0, options=ClaimOptions(force=True)).ids == ids(4)
    assert group.pending.summary().by_consumer == {"a": 1}


def test_claiming_idle_entries_reads_the_whole_list_and_names_the_trimmed_ones(client: Client, group: Group) -> None:
    client.pipeline([("XADD", "s", f"{n}-0", "n", n) for n in range(10, 3001)])
    delivered = read_new(client, "dead", count=3000)
    client.execute("XDEL", "s", *delivered[::100])
    time.sleep(0.06)  # at least: from when on they may be claimed
    batches = list(group.pending.auto_claim("a", min_idle_ms=50, count=7))
    assert [one for batch in batches for one in batch.gone] == delivered[::100]
    assert [one for batch in batches for one in batch.ids] == [one for n, one in enumerate(delivered) if n % 100]
    assert group.pending.summary().by_consumer == {"a": 2970}
    assert list(group.pending.auto_claim("b", min_idle_ms=HOUR_MS)) == []


def test_claiming_idle_entries_passes_a_long_run_of_busy_ones(client: Client, group: Group) -> None:
    client.pipeline([("XADD", "s", f"{n}-0", "n", n) for n in range(10, 1001)])
    delivered = read_new(client, "busy", count=1000)
    group.pending.claim_ids(delivered[-1:], consumer="dead", min_idle_ms=0, options=ClaimOptions(idle_ms=HOUR_MS))
    assert [batch.ids for batch in group.pending.auto_claim("a", min_idle_ms=HOUR_MS, count=1)] == [delivered[-1:]]


def test_claiming_idle_ids_alone_counts_no_delivery(client: Client, group: Group) -> None:
    read_new(client, "dead")
    client.execute("XDEL", "s", "2-0")
    pages = list(group.pending.auto_claim_ids("a", min_idle_ms=0, count=4))
    assert [one for page in pages for one in page.ids] == ids(1, 3, 4, 5, 6, 7, 8, 9)
    assert [one for page in pages for one in page.gone] == ids(2)
    assert {entry.deliveries for entry in group.pending.iter_entries()} == {1}


# Consumers


def test_consumers_are_listed_with_their_pending_entries_and_idle_time(client: Client, group: Group) -> None:
    assert group.create_consumer("z")
    assert not group.create_consumer("z")
    before_ms = server_time_ms(client)
    read_new(client, "a", count=2)
    eventually(lambda: group.consumers()[0].idle_ms >= 10, "some silence")
    first, last = group.consumers()
    assert (first.name, first.pending, last.name, last.pending) == ("a", 2, "z", 0)
    assert first.idle_ms <= since(client, before_ms)


def test_deleting_a_consumer_reassigns_its_pending_entries_with_idle_times_and_counts(
    client: Client, group: Group
) -> None:
    client.pipeline([("XADD", "s", f"{n}-0", "n", n) for n in range(10, 1203)])
    delivered = read_new(client, "leaver", count=1202)  # more than one step reassigns
    client.execute("XDEL", "s", "7-0", "1100-0")
    options = ClaimOptions(idle_ms=90_000, deliveries=5)
    group.pending.claim_ids(ids(3), consumer="leaver", min_idle_ms=0, options=options)
    group.create_consumer("heir")
    left = group.delete_consumer("leaver", transfer_to="heir")
    assert (left.existed, left.reassigned, list(left.gone)) == (True, 1200, ids(7, 1100))
    assert [one.name for one in group.consumers()] == ["heir"]
    kept = [one for one in delivered if one not in ids(7, 1100)]
    assert [one.id for one in group.pending.iter_entries(consumer="heir")] == kept
    third = group.pending.entries("3-0", "3-0")[0]
    assert third.deliveries == 5
    assert third.idle_ms >= 90_000
    assert group.pending.entries("1-0", "1-0")[0].deliveries == 1


def test_a_consumer_with_pending_entries_is_not_deleted_without_an_heir(client: Client, group: Group) -> None:
    read_new(client, "leaver", count=3)
    with pytest.raises(ConfigError, match=r"holds 3 pending entries.*name the consumer that gets them"):
        group.delete_consumer("leaver")
    with pytest.raises(ConfigError, match="no consumer 'nobody'"):
        group.delete_consumer("leaver", transfer_to="nobody")
    with pytest.raises(ConfigError, match="its own entries"):
        group.delete_consumer("leaver", transfer_to="leaver")
    assert group.pending.summary().by_consumer == {"leaver": 3}
    group.ack(ids(1, 2, 3))
    assert group.delete_consumer("leaver").existed
    assert not group.delete_consumer("leaver").existed


def test_entries_that_a_consumer_reads_while_it_is_deleted_are_not_dropped(client: Client, group: Group) -> None:
    group.create_consumer("heir")
    stop = threading.Event()

    def read() -> None:
        with Client(client.url) as own:
            while not stop.is_set():
                read_new(own, "leaver", count=3)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for start in range(10, 4010, 100):
            client.pipeline([("XADD", "s", f"{n}-0", "n", n) for n in range(start, start + 100)])
            eventually(lambda: "leaver" in group.pending.summary().by_consumer, "it to be given something")
            group.delete_consumer("leaver", transfer_to="heir")
    finally:
        eventually(lambda: groups_of(client, "s")[0].last_delivered == b"4009-0", "all to be read")
        stop.set()
        thread.join()
    pending = group.pending.summary()
    assert pending.count == 4009  # every entry that was delivered still has an owner
    assert pending.by_consumer["heir"] > 0


def test_only_idle_consumers_without_pending_entries_are_removed(client: Client, group: Group) -> None:
    read_new(client, "holds", count=1)
    group.create_consumer("silent")
    assert group.delete_idle_consumers(min_idle_ms=HOUR_MS) == [], "it was heard of within the hour"
    eventually(lambda: group.delete_idle_consumers(min_idle_ms=20) == ["silent"], "it to be silent for long enough")
    assert [one.name for one in group.consumers()] == ["holds"]


def test_only_named_consumers_are_removed_where_names_are_given(client: Client, group: Group) -> None:
    for name in ("one", "other"):
        group.create_consumer(name)
    assert group.delete_idle_consumers(0, only={"one"}) == ["one"]
    assert [one.name for one in group.consumers()] == ["other"]


def test_a_consumer_leaves_the_groups_in_which_it_has_no_pending_entries(client: Client, group: Group) -> None:
    add(client, "t", range(1, 3))
    other = Group(client, "t", "g")
    other.create()
    assert len(consumer(client, "c", "s", "t").read_new()) == 2
    other.ack(ids(1, 2))
    delete_if_empty(client, [group, other], "c")
    assert ([one.name for one in group.consumers()], other.consumers()) == (["c"], [])
    assert group.pending.summary().count == 9


def test_a_consumer_that_becomes_active_between_the_check_and_the_removal_stays(
    client: Client, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.create_consumer("c")
    group.create_consumer("d")
    seen = [replace(one, idle_ms=2 * HOUR_MS) for one in group.consumers()]  # as if they had slept since then
    read_new(client, "c", count=1)
    consumer(client, "d").read_pending()
    monkeypatch.setattr(group, "consumers", lambda: seen)
    assert group.delete_idle_consumers(min_idle_ms=HOUR_MS) == []
    assert len(client.execute("XINFO", "CONSUMERS", "s", "g")) == 2
    assert group.pending.summary().count == 1


def test_consumers_leave_and_entries_are_acknowledged_when_redis_is_out_of_memory(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    with Client(millstream_fresh_server.url) as client:
        add(client, "s", range(1, 4))
        group = Group(client, "s", "g")
        group.create()
        read_new(client, "leaver")
        group.create_consumer("heir")
        client.execute("CONFIG", "SET", "maxmemory", "1")
        assert group.delete_consumer("leaver", transfer_to="heir").reassigned == 3
        assert len(list(group.pending.auto_claim("other", min_idle_ms=0))) == 1
        assert group.ack(ids(1, 2, 3)) == 3


# Deployments


def test_names_that_are_not_utf_8_are_returned_unchanged(client: Client) -> None:
    name = b"\xff\x00".decode("utf-8", "surrogateescape")
    group = Group(client, name, name)
    group.create(mkstream=True)
    client.execute("XADD", b"\xff\x00", "1-0", "a", 1)
    reader = Consumer(client, group=name, name=name, streams=[name])
    assert [batch.stream for batch in reader.read_new()] == [name]
    assert group.pending.entries()[0].consumer == name
    assert group.consumers()[0].name == name
    assert group.delete_consumer(name, transfer_to=None if group.ack([b"1-0"]) else name).existed


def test_groups_work_on_a_cluster(request: pytest.FixtureRequest) -> None:
    with Client(lent_cluster(request).url) as client:
        for stream in ("a", "b", "c", "d"):
            add(client, stream, range(1, 3))
            group = Group(client, stream, "g")
            assert group.create()
            reader = consumer(client, "c", stream)
            assert reader.read_new()[0].ids == ids(1, 2)
            group.create_consumer("heir")
            assert group.delete_consumer("c", transfer_to="heir").reassigned == 2
            assert [batch.ids for batch in group.pending.auto_claim("x", min_idle_ms=0)] == [ids(1, 2)]
            assert group.ack(ids(1, 2)) == 2
        add(client, "{a}2", range(1, 3))
        Group(client, "{a}2", "g").create()
        assert [batch.stream for batch in consumer(client, "c", "a", "{a}2").read_new()] == ["{a}2"]
        with pytest.raises(CommandFailed, match="hash"):
            consumer(client, "c", "a", "b").read_new()


def test_a_replica_serves_plain_reads_and_refuses_group_commands(millstream_fresh_server: EmbeddedServer) -> None:
    primary = millstream_fresh_server
    primary.call("CONFIG", "SET", "repl-diskless-sync-delay", 0)
    with EmbeddedServer(extra={"replicaof": f"127.0.0.1 {primary.port}"}) as replica:
        with Client(primary.url) as client:
            add(client, "s", range(1, 4))
            Group(client, "s", "g").create()
        with Client(replica.url) as client:
            eventually(lambda: bool(client.execute("EXISTS", "s")), "the replica to follow")
            eventually(lambda: bool(groups_of(client, "s")), "the group to arrive")
            assert [entry[0] for entry in client.execute("XRANGE", "s", "-", "+")] == ids(1, 2, 3)
            with pytest.raises(Unavailable, match=r"is a replica"):
                read_new(client)
