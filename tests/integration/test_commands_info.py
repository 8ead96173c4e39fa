"""`millstream info` and `millstream state`."""

import itertools
import re
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from millstream.admin.consumption_summary import ReaderReport, summarize_readers
from millstream.admin.inspection import inspect
from millstream.admin.reports import HandlerReport, Inspection
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.effects import Effects
from millstream.handlers.encoding import pack_output
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, stage_group, worker_name_key
from millstream.redis_client.pipelining import server_time_ms
from millstream.spark.run import liveness
from millstream.spark.run.liveness import announce_run, begin_run, keep_announced
from millstream.spark.source.group_batch_planner import GroupBatchPlanner
from millstream.spark.source.group_offsets import BEFORE_FIRST_BATCH
from millstream.spark.source.options import parse
from tests.support.clocks import ManualClock
from tests.support.commandline import call
from tests.support.planning import planned_group_end
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli]

KEYS = HandlerKeys("airline", "departure", "flights")
ENDLESS_MS = 1e12
HOUR_MS = 3_600_000


def fill(client: Client, stream: str, count: int, size: int = 1) -> None:
    """Add entries 1-0, 2-0, 3-0, ..."""
    for first in range(1, count + 1, 5_000):
        numbers = range(first, min(first + 5_000, count + 1))
        client.pipeline([("XADD", stream, f"{number}-0", "n", "x" * size) for number in numbers])


def committed_id(client: Client, entry_id: str, keys: HandlerKeys = KEYS) -> None:
    """Have the handler done up to an id."""
    client.execute("HSET", keys.meta, "committed_id", entry_id)


def handler(found: Inspection) -> HandlerReport:
    """The one handler that was found."""
    (report,) = found.handlers
    return report


def test_info_of_an_empty_redis_shows_nothing(client: Client) -> None:
    assert inspect(client) == Inspection(streams=(), handlers=())
    assert call("info", url=client.url).err == "there are no streams\n"
    assert call("info", "--json", url=client.url).json() == {
        "readers": [],
        "streams": [],
        "handlers": [],
        "restarts": [],
        "long_runs": [],
        "hidden_streams": 0,
        "problems": [],
        "hidden_handlers": 0,
        "is_sample": False,
    }


def test_streams_are_shown_with_their_ends_ages_and_groups(client: Client) -> None:
    now_ms = server_time_ms(client)
    client.execute("XADD", "s", f"{now_ms - 60_000}-0", "a", "b")
    client.execute("XADD", "s", f"{now_ms}-0", "a", "b")
    client.execute("XGROUP", "CREATE", "s", "workers", "0")
    client.execute("XREADGROUP", "GROUP", "workers", "one", "COUNT", 1, "STREAMS", "s", ">")
    client.execute("XGROUP", "CREATE", "empty", "g", "$", "MKSTREAM")
    client.execute("SET", "no stream", "x")
    empty, filled = inspect(client).streams
    later_ms = server_time_ms(client) - now_ms
    assert (empty.name, empty.length, empty.first_id, empty.oldest_age_ms) == ("empty", 0, None, None)
    assert (filled.length, filled.first_id, filled.last_id) == (2, f"{now_ms - 60_000}-0", f"{now_ms}-0")
    assert 60_000 <= (filled.oldest_age_ms or 0) <= 60_000 + later_ms
    assert [(group.name, group.consumers, group.pending) for group in filled.groups] == [("workers", 1, 1)]
    assert "workers (1, 1)" in call("info", url=client.url).out
    assert (
        call("info", "--json", url=client.url).json()["streams"][1]["groups"][0]["last_delivered_id"]
        == f"{now_ms - 60_000}-0"
    )


@pytest.mark.parametrize(
    ("position", "deleted", "lag", "first_waiting"),
    [
        ("10-0", (), 0, None),
        ("99-0", (), 0, None),
        ("9-7", (), 1, 10),
        ("4-0", (), 6, 5),
        ("4-0", (7, 8), 4, 5),
        ("4-0", (5, 9, 10), 3, 6),
        ("4-0", (5, 6, 7, 8, 9, 10), 0, None),
        ("0-1", (), 10, 1),
        ("0-1", (1, 2), 8, 3),
        ("2-0", (1, 2, 3), 7, 4),
    ],
)
def test_the_lag_is_exact_after_any_deletion(
    client: Client, position: str, deleted: Sequence[int], lag: int, first_waiting: int | None
) -> None:
    fill(client, "flights", 10)
    committed_id(client, position)
    if deleted:
        client.execute("XDEL", "flights", *(f"{number}-0" for number in deleted))
    before_ms, report, after_ms = server_time_ms(client), handler(inspect(client)), server_time_ms(client)
    assert (report.lag, report.lag_exact, report.committed_id) == (lag, True, position)
    assert (report.oldest_age_ms is None) == (first_waiting is None)
    if first_waiting is not None:
        assert before_ms <= first_waiting + (report.oldest_age_ms or 0) <= after_ms


def test_a_lag_that_redis_does_not_know_is_counted_and_an_unknown_one_is_shown_as_unknown(client: Client) -> None:
    fill(client, "flights", 12_345)
    client.execute("HSET", KEYS.meta, "epoch", "7")
    assert handler(inspect(client)).lag is None
    assert " ? " in call("info", url=client.url).out
    client.execute("XGROUP", "CREATE", "flights", KEYS.group, "45-0")
    assert handler(inspect(client, budget_ms=ENDLESS_MS)).lag == 12_300
    committed_id(client, "345-0")
    assert handler(inspect(client, budget_ms=ENDLESS_MS)).lag == 12_000


def test_counting_stops_when_its_time_is_over_and_reports_a_lower_bound(client: Client) -> None:
    fill(client, "flights", 30_000, size=100)
    committed_id(client, "1-0")
    report = handler(inspect(client, budget_ms=0))
    assert not report.lag_exact
    assert 500 <= (report.lag or 0) < 29_999
    assert handler(inspect(client, budget_ms=ENDLESS_MS)).lag == 29_999


def test_huge_entries_are_counted_a_few_at_a_time(client: Client) -> None:
    fill(client, "flights", 200, size=200_000)
    committed_id(client, "1-0")
    assert handler(inspect(client, budget_ms=0)).lag == 50
    assert handler(inspect(client, budget_ms=ENDLESS_MS)).lag == 199


def test_handlers_are_shown_with_their_counters_and_dead_letters(client: Client) -> None:
    fill(client, "flights", 5)
    store = CommitStore(client, app="airline", handler="departure", into="departures")
    unit = Effects(
        b"k",
        b"",
        first_id="2-0",
        last_id="3-0",
        message_count=2,
        outputs=[pack_output({"a": "b"})],
        dead_letters=[["c", "d"]],
    )
    store.commit({"flights": [unit]})
    committed_id(client, "3-0")
    client.execute("HSET", HandlerKeys("other", "h", "elsewhere").meta, "committed_id", "9-9")
    client.execute("HSET", "millstream:nonsense:meta", "committed_id", "x")
    report, other = inspect(client).handlers
    assert (report.committed, report.written, report.dead, report.refused, report.dead_letters) == (2, 1, 1, 0, 1)
    assert report.processed == 1
    assert re.search(
        r" processed +written .*\n.* spark \(0\) +- +1 +1 +0 +1 +3-0", call("info", "--wide", url=client.url).out
    )
    assert (other.app, other.stream, other.lag) == ("other", "elsewhere", 0)
    only = call("info", "airline", "--json", url=client.url).json()
    assert [stream["name"] for stream in only["streams"]] == ["flights"]
    assert only["handlers"][0]["dead_letters"] == 1
    shown = call("info", "airline", url=client.url)
    assert "airline.departure" in shown.out
    assert "departures" not in shown.out, "it is not a stream that the app reads"
    assert "'nobody' has run on this Redis" in call("info", "nobody", url=client.url).err


def reader(found: Inspection, name: str) -> ReaderReport:
    """What was found of the reader of that name."""
    (report,) = (one for one in summarize_readers(found) if one.name == name)
    return report


def test_the_streams_of_a_handler_are_summed_up(client: Client) -> None:
    for stream, count, done in (("a", 5, 5), ("b", 5, 2), ("c", 5, 0)):
        fill(client, stream, count)
        keys = HandlerKeys("shop", "bill", stream)
        client.execute("HSET", keys.meta, "committed_id", f"{done}-0", "keyed", 1, "committed", done)
    client.execute("HSET", keys.parked, "kA", "1 failed", "kB", "1 failed")
    client.execute("XGROUP", "CREATE", "c", keys.group, "0")
    client.execute("XCLAIM", "c", keys.group, "waiting", 0, "1-0", "2-0", "FORCE", "JUSTID")
    committed_id(client, "2-0", keys)
    client.execute("XADD", keys.dead_letters, "*", "a", "b")
    before_ms, found = server_time_ms(client), reader(inspect(client), "shop.bill")
    assert (found.kind, found.modes, found.alive, found.streams) == ("handler", ("spark by key",), 0, 3)
    assert (found.lag, found.lag_exact, found.lag_min, found.lag_avg, found.lag_max) == (8, True, 0, 8 / 3, 5)
    assert found.largest_lags == (("c", 5), ("b", 3))
    assert (found.pending, found.parked, found.dead_letters) == (2, 2, 1)
    assert (found.added, found.done) == (15, 7)
    assert before_ms <= 1 + (found.oldest_age_ms or 0) <= server_time_ms(client)
    client.execute("HDEL", HandlerKeys("shop", "bill", "a").meta, "committed_id")
    unsure = reader(inspect(client), "shop.bill")
    assert (unsure.lag, unsure.lag_exact, unsure.lag_min, unsure.lag_avg) == (8, False, 3, 4)
    assert ">8" in call("info", "shop", url=client.url).out
    shown = call("info", "shop", "--wide", url=client.url).out
    assert ">8" in shown
    assert "c (5), b (3)" in shown
    (row,) = call("info", "--json", url=client.url).json()["readers"]
    assert (row["lag"], row["lag_min"], row["lag_avg"], row["lag_max"], row["lag_exact"]) == (8, 3, 4.0, 5, False)
    assert row["largest_lags"] == [{"stream": "c", "lag": 5}, {"stream": "b", "lag": 3}]


def test_stages_and_groups_are_shown_with_their_lag_and_pending_entries(client: Client) -> None:
    for stream in ("a", "b"):
        fill(client, stream, 10)
        client.execute("XGROUP", "CREATE", stream, stage_group("shop", "minutes"), "4-0", "ENTRIESREAD", 4)
        client.execute("XGROUP", "CREATE", stream, "billing", "0")
    client.execute("XREADGROUP", "GROUP", "billing", "w1", "COUNT", 3, "STREAMS", "a", ">")
    client.execute("XREADGROUP", "GROUP", "billing", "w2", "COUNT", 3, "STREAMS", "b", ">")
    client.execute("XACK", "b", "billing", "1-0", "2-0")
    announce_run(client, "shop", ["minutes"], epoch=1)
    found = inspect(client)
    stage, group = reader(found, "shop.minutes"), reader(found, "billing")
    assert (stage.kind, stage.modes, stage.alive, stage.lag, stage.done) == ("stage", ("spark, stage",), 1, 12, 8)
    assert (group.kind, group.modes, group.alive, group.lag, group.done) == ("group", ("consumers",), 2, 18, 6)
    assert (group.lag_min, group.lag_max, group.pending, group.largest_lags) == (8, 10, 4, (("a", 10), ("b", 8)))
    assert {one.name for one in summarize_readers(inspect(client, "shop"))} == {"shop.minutes", "billing"}
    assert inspect(client, "other").streams == ()


def test_a_query_that_shares_a_group_is_one_consumer_of_the_group(client: Client) -> None:
    fill(client, "a", 10)
    client.execute("XGROUP", "CREATE", "a", "billing", "0")
    options = parse({"url": client.url, "subscribe": "a", "readAs": "group", "group": "billing"}, {})
    assert options.sharing is not None
    planner = GroupBatchPlanner(client, options, options.sharing, cores=2)
    place = planned_group_end(planner, BEFORE_FIRST_BATCH, limit=options.limits.max_per_trigger)
    planner.close()
    assert place.non_empty == {"a": 10}
    client.execute("XGROUP", "CREATECONSUMER", "a", "billing", "plain-7")
    found = reader(inspect(client), "billing")
    assert (found.modes, found.lag, found.pending) == (("spark, readAs=group",), 10, 10)
    assert found.alive == 2, "its portions are no others"
    assert "spark, readAs=group" in call("info", "--wide", url=client.url).out


def test_the_handlers_of_a_run_on_spark_are_shown_as_alive(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_INTERVAL_S", 1.0)
    monkeypatch.setattr(liveness, "_TTL_MS", HOUR_MS)  # the test does not renew the newer run
    fill(client, "flights", 3)
    committed_id(client, "1-0")
    assert (reader(inspect(client), "airline.departure").alive, handler(inspect(client)).consumers) == (0, 0)
    over = threading.Event()
    epoch = begin_run(client, "airline", ["departure"])
    assert epoch is not None
    replaced: list[set[str]] = []
    run = threading.Thread(
        target=keep_announced,
        args=(client.url, "airline", lambda: ["departure"], over),
        kwargs={"epoch": epoch, "progress": dict, "running": {}, "on_replaced": replaced.append},
    )
    run.start()
    key = worker_name_key("airline", "spark:departure")
    try:
        eventually(lambda: handler(inspect(client)).workers == ("spark:departure",), "the run is seen")
        client.execute("DEL", key)
        eventually(lambda: client.execute("GET", key) == str(epoch).encode(), "it is announced again")
        assert replaced == []
        newer = begin_run(client, "airline", ["departure"])
        assert newer is not None

        def has_noticed() -> bool:
            announce_run(client, "airline", ["departure"], epoch=newer)  # again, as a run does
            return bool(replaced)

        eventually(has_noticed, "the older run, which may have been about to renew, to find the newer one")
        eventually(lambda: len(replaced) >= 3, "checks with a renewal between them")
        assert replaced[0] == {"departure"}
        assert int(client.execute("GET", key)) == newer, "the older run leaves the key to the newer one"
    finally:
        over.set()
        run.join(FAIL_SAFE_S)
    assert "spark (1)" in call("info", "--wide", url=client.url).out
    assert 0 < client.execute("PTTL", key) <= HOUR_MS


def test_two_reports_give_rates(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(client, "flights", 10)
    committed_id(client, "4-0")
    client.execute("HSET", KEYS.meta, "committed", 4)

    class Meanwhile(ManualClock):
        """While it sleeps, the streams grow and the handler works."""

        def monotonic(self) -> float:
            return self.monotonic_ms() / 1000

        def sleep(self, seconds: float) -> None:
            client.pipeline([("XADD", "flights", f"{n}-0", "n", n) for n in range(11, 31)])
            client.execute("HSET", KEYS.meta, "committed", 14)
            self.sleep_ms(seconds * 1000)

    monkeypatch.setattr("millstream.cli.info.time", Meanwhile())
    (row,) = call("info", "--over", "2s", "--json", url=client.url).json()["readers"]
    assert (row["arriving_per_s"], row["done_per_s"]) == (10.0, 5.0)
    assert call("info", "--over", "soon", url=client.url).code == 2


def test_thousands_of_streams_take_a_few_round_trips(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.pipeline([("XADD", f"s{number}", "1-0", "a", "b") for number in range(2_000)])
    client.pipeline([("XADD", f"s{number}", "2-0", "a", "b") for number in range(2_000)])
    client.pipeline([("HSET", HandlerKeys("a", "h", f"s{n}").meta, "committed_id", "1-0") for n in range(2_000)])
    client.pipeline([("XGROUP", "CREATE", f"s{n}", "billing", "1-0") for n in range(2_000)])
    client.pipeline([("XREADGROUP", "GROUP", "billing", "w", "STREAMS", f"s{n}", ">") for n in range(1_000)])
    trips, exchange = itertools.count(), Client._exchange

    def count(one: Client, *args: Any) -> Any:
        if one is client:  # a thread of another test may still use a client of its own
            next(trips)
        return exchange(one, *args)

    monkeypatch.setattr(Client, Client._exchange.__name__, count)
    found = inspect(client, clock=ManualClock())
    assert next(trips) < 100, "how long that takes, `python -m benchmarks info` says"
    assert len(found.streams) == 2_000
    assert sum(report.lag or 0 for report in found.handlers) == 2_000
    assert (reader(found, "billing").lag, reader(found, "billing").pending) == (2_000, 1_000)
    shown = call("info", url=client.url)
    assert shown.out.count("\n") < 120
    assert "1,950 more streams; use --limit or --json to show them" in shown.err


# --- State ---


def keep(client: Client, **states: object) -> None:
    """Have the handler keep a state for each key."""
    for key, value in states.items():
        client.execute("HSET", KEYS.state, key, msgspec.msgpack.encode(value))


STATE = ("airline.departure", "--stream", "flights")


def test_the_state_of_a_key_is_shown_whole(client: Client) -> None:
    keep(client, N1={"flights": 3, "delay": 1.5, "raw": b"\xff", "seen": ["é", None, {"x": b"text"}]})
    expected = {"flights": 3, "delay": 1.5, "raw": {"hex": "ff"}, "seen": ["é", None, {"x": "text"}]}
    assert call("state", "show", *STATE, "N1", "--json", url=client.url).json() == expected
    assert call("state", "show", *STATE, "N1", url=client.url).json() == expected
    missing = call("state", "show", *STATE, "N2", url=client.url)
    assert missing.code == 1
    assert "has no state for N2" in missing.err


def test_keys_of_any_bytes_are_listed_and_accepted_as_they_are_listed(client: Client) -> None:
    key = b"\xff\x1b[31m\\ \n"
    client.execute("HSET", KEYS.state, key, msgspec.msgpack.encode({"n": 1}))
    keep(client, N1={"n": 2})
    (listed,) = (line for line in call("state", "list", *STATE, url=client.url).out.splitlines() if "xff" in line)
    written = r"\xff\x1b[31m\\ \n"
    assert listed.startswith(written)
    assert call("state", "show", *STATE, written, "--json", url=client.url).json() == {"n": 1}
    by_json = call("state", "list", *STATE, "--json", url=client.url).json_lines()
    assert by_json == [{"key": "N1", "state": {"n": 2}}, {"key": {"hex": key.hex()}, "state": {"n": 1}}]
    assert call("state", "reset", *STATE, written, "--yes", "--json", url=client.url).json() == {
        "keys": 1,
        "reset": 1,
        "dry_run": False,
    }
    assert client.execute("HKEYS", KEYS.state) == [b"N1"]


def test_listing_is_bounded_and_can_be_narrowed(client: Client) -> None:
    client.execute("HSET", KEYS.state, *(part for n in range(3_000) for part in (f"N{n}", b"\x80")))
    few = call("state", "list", *STATE, "--json", "--limit", "7", url=client.url)
    assert len(few.json_lines()) == 7
    assert "there are more keys" in few.err
    some = call("state", "list", *STATE, "--json", "--match", "N123*", url=client.url)
    assert sorted(line["key"] for line in some.json_lines()) == sorted(["N123", *(f"N123{n}" for n in range(10))])


def test_a_damaged_state_is_reported_and_can_be_reset(client: Client) -> None:
    client.execute("HSET", KEYS.state, "N1", b"\xc1")
    shown = call("state", "show", *STATE, "N1", url=client.url)
    assert shown.code == 1
    assert "is damaged" in shown.err
    assert call("state", "list", *STATE, "--json", url=client.url).json() == {
        "key": "N1",
        "state": None,
        "damaged": "c1",
    }
    tried = call("state", "reset", *STATE, "N1", "N2", "--dry-run", url=client.url)
    assert tried.out == "1 key would be reset, 1 had no state\n"
    assert call("state", "reset", *STATE, "N1", "N2", "--yes", url=client.url).out == "1 key reset, 1 had no state\n"


def test_a_reset_warns_of_live_runs_and_needs_yes(client: Client) -> None:
    keep(client, N1={"n": 1})
    unasked = call("state", "reset", *STATE, "N1", url=client.url)
    assert unasked.code == 2
    assert "next batch" in unasked.err
    assert client.execute("HLEN", KEYS.state) == 1
    assert call("state", "reset", *STATE, "a\\q", "--yes", url=client.url).code == 2
