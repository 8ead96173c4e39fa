"""Filters of a batch read: pushed down, they change what Redis is asked for and nothing of what is found."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from millstream.model import ZERO_ID, EntryId
from millstream.spark.source.filters import ReadFilter
from millstream.spark.source.offsets import Position
from tests.support.sources import Bench

pytestmark = [pytest.mark.spark]

COLUMNS = {name: name for name in ("stream", "id", "id_ms", "timestamp")}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CONF = "spark.sql.python.filterPushdown.enabled"

numbers = st.integers(-2, 12)
names = st.text("ab", max_size=3)
times = st.integers(-2_000, 12_000).map(lambda us: EPOCH + timedelta(microseconds=us))
ORDERS = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]
TEXTS = [EqualTo, EqualNullSafe, StringStartsWith, StringEndsWith, StringContains]
on_ids = st.one_of(
    st.builds(lambda kind, value: kind(("id_ms",), value), st.sampled_from(ORDERS), numbers),
    st.builds(lambda kind, value: kind(("timestamp",), value), st.sampled_from(ORDERS), times),
    st.builds(
        lambda kind, value: kind(("id",), value), st.sampled_from(ORDERS[:2]), st.sampled_from(["5-1", "05-1", "x"])
    ),
    st.builds(lambda values: In(("id_ms",), tuple(values)), st.lists(numbers, min_size=1, max_size=3)),
    st.builds(lambda values: In(("timestamp",), tuple(values)), st.lists(times, min_size=1, max_size=3)),
)
on_streams = st.one_of(
    st.builds(lambda kind, value: kind(("stream",), value), st.sampled_from(TEXTS), names),
    st.builds(lambda values: In(("stream",), tuple(values)), st.lists(names, min_size=1, max_size=3)),
)
filters = st.one_of(on_ids, on_streams, st.builds(Not, on_streams), st.builds(Not, on_ids))


def holds(condition: Filter, stream: str, entry_id: EntryId) -> bool:
    """What Spark makes of a filter on one row."""
    if isinstance(condition, Not):
        return not holds(condition.child, stream, entry_id)
    row = {
        "stream": stream,
        "id": str(entry_id),
        "id_ms": entry_id.ms,
        "timestamp": EPOCH + timedelta(milliseconds=entry_id.ms),
    }
    (column,), wanted = condition.attribute, condition.value  # type: ignore[attr-defined]
    value = row[column]
    outcomes: dict[type[Filter], Callable[[], bool]] = {
        EqualTo: lambda: value == wanted,
        EqualNullSafe: lambda: value == wanted,
        GreaterThan: lambda: value > wanted,
        GreaterThanOrEqual: lambda: value >= wanted,
        LessThan: lambda: value < wanted,
        LessThanOrEqual: lambda: value <= wanted,
        In: lambda: value in wanted,
        StringStartsWith: lambda: str(value).startswith(wanted),
        StringEndsWith: lambda: str(value).endswith(wanted),
        StringContains: lambda: wanted in str(value),
    }
    return outcomes[type(condition)]()


@given(st.lists(filters, max_size=4), names, st.builds(EntryId, st.integers(0, 12), st.integers(0, 2)))
def test_no_row_that_passes_all_filters_is_left_out_and_none_that_fails_a_pushed_one_is_read(
    conditions: list[Filter], stream: str, entry_id: EntryId
) -> None:
    selection = ReadFilter(COLUMNS)
    pushed = [condition for condition in conditions if selection.add(condition)]
    found = selection.accepts(stream) and selection.min_id <= entry_id <= selection.max_id
    if all(holds(condition, stream, entry_id) for condition in conditions):
        assert found
    if found:
        assert all(holds(condition, stream, entry_id) for condition in pushed)


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("us", [4_000, 4_001, 4_999, -1, 0])
def test_a_time_between_two_milliseconds_bounds_the_ids_exactly(kind: Callable[..., Filter], us: int) -> None:
    condition = kind(("timestamp",), EPOCH + timedelta(microseconds=us))
    selection = ReadFilter(COLUMNS)
    assert selection.add(condition)
    for entry_id in (EntryId(ms, seq) for ms in range(9) for seq in (0, 2**64 - 1)):
        assert (selection.min_id <= entry_id <= selection.max_id) == holds(condition, "s", entry_id)


def test_a_condition_that_is_no_range_of_ids_or_choice_of_streams_is_left_to_spark() -> None:
    selection = ReadFilter(COLUMNS)
    left = [
        IsNotNull(("id_ms",)),
        GreaterThan(("id",), "5-0"),
        GreaterThan(("id_seq",), 5),
        EqualTo(("id_ms", "inner"), 5),
        EqualNullSafe(("id_ms",), None),
        Not(EqualTo(("id_ms",), 5)),
        GreaterThan(("stream",), "a"),
        In(("id_ms",), (5, 9)),
        EqualTo(("elsewhere",), "a"),
    ]
    assert not [condition for condition in left if selection.add(condition)]
    assert (selection.min_id, selection.max_id) == (EntryId(5, 0), EntryId(9, 2**64 - 1)), "but the values are bounds"


def test_a_range_keeps_the_counts_of_the_ends_that_it_does_not_move() -> None:
    selection = ReadFilter(COLUMNS)
    start, end = {"s": Position(EntryId(4, 0), 4)}, {"s": Position(EntryId(9, 0), 9), "later": Position(ZERO_ID, 0)}
    assert selection.narrow(start, end) == (start, {"s": end["s"]})
    selection.add(GreaterThanOrEqual(("id_ms",), 6))
    selection.add(LessThan(("id_ms",), 8))
    assert selection.narrow(start, end) == (
        {"s": Position(EntryId(5, 2**64 - 1), None)},
        {"s": Position(EntryId(7, 2**64 - 1), None)},
    )


# --- through Spark ---


@pytest.fixture
def pushing(bench: Bench) -> Iterator[Bench]:
    """A session that gives filters to sources."""
    bench.spark.conf.set(CONF, "true")
    yield bench
    bench.spark.conf.unset(CONF)


def frame(bench: Bench, *, push: bool) -> DataFrame:
    options = {"url": bench.url, "subscribePattern": "shop:*", "pushDownPredicate": str(push)}
    return bench.spark.read.format("redis-streams").options(**options).load()


def sent(bench: Bench) -> int:
    """Bytes that Redis has sent so far."""
    found = bench.client.execute("INFO", "stats").decode().partition("total_net_output_bytes:")[2]
    return int(found.partition("\r")[0])


def test_filters_change_the_data_that_redis_sends_and_not_the_result(pushing: Bench) -> None:
    bench = pushing
    for n in range(8):
        bench.add_raw(
            f"shop:{n}",
            (["n", str(k), "pad", "x" * 100] for k in range(2_000)),
            ids=(f"{1_700_000_000_000 + k // 2}-{k % 2}" for k in range(2_000)),
        )
    conditions = {
        "id_ms between 1700000000100 and 1700000000119": 8 * 40,
        "timestamp >= timestamp'2023-11-14T22:13:20.990Z' and stream <> 'shop:0'": 7 * 20,
        "stream in ('shop:3', 'shop:5') and id_ms = 1700000000007": 4,
        "stream like '%:1' and id = '1700000000500-1'": 1,
        "id_ms in (1700000000001, 1700000000004) and id_seq = 0": 16,
        "id_ms < 5": 0,
    }
    plain_rows = frame(bench, push=False).select(*COLUMNS, "id_seq").persist()
    # Spark's first read of a session costs Redis something that later ones do not.
    everything = _measured(plain_rows, bench)[1]
    for condition, count in conditions.items():
        plain, _ = _measured(plain_rows.where(condition), bench)
        pushed, cost = _measured(frame(bench, push=True).where(condition), bench)
        assert pushed == plain
        assert len(pushed) == count
        assert 0 < cost < everything / 20, condition
    plain_rows.unpersist()
    rows = frame(bench, push=True).where("fields[0].value = cast('7' as binary) and (stream = 'shop:1' or id_ms = 1)")
    assert rows.count() == 1, "what no source can take is done by Spark"


def _measured(rows: DataFrame, bench: Bench) -> tuple[list[tuple[str, str]], int]:
    before = sent(bench)
    found = sorted((row["stream"], row["id"]) for row in rows.collect())
    return found, sent(bench) - before


def test_filters_on_the_columns_of_a_schema_are_pushed_down_too(pushing: Bench) -> None:
    bench = pushing
    bench.add_raw("shop:1", (["id_ms", str(k)] for k in range(500)), ids=(f"{k + 1}-0" for k in range(500)))
    reader = bench.spark.read.format("redis-streams").options(url=bench.url, subscribe="shop:1", pushDownPredicate=True)
    typed = reader.schema("_id_ms long, id_ms long").load()
    before = sent(bench)
    assert [row["id_ms"] for row in typed.where("_id_ms = 5 and id_ms = 4").collect()] == [4]
    assert sent(bench) - before < 3_000


def test_the_error_of_a_filter_without_the_session_setting_names_the_setting(bench: Bench) -> None:
    bench.add("shop:1", 3)
    with pytest.raises(PySparkException, match=CONF.replace(".", r"\.")):
        frame(bench, push=True).where("id_ms > 5").collect()
    assert frame(bench, push=False).where("id_ms > 5").count() == 3
