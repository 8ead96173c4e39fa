"""ReadFilter: Spark's filters on stream, id and time as a range of ids and tests of stream names. No I/O.

Imported where Spark has filters only, since 4.1.
"""

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from millstream.errors import ConfigError
from millstream.model import LAST_ID, ZERO_ID, EntryId
from millstream.spark.greatest_numbers import MAX_TIMESTAMP_MS
from millstream.spark.source.read_range import NameTest, ReadRange

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EQUAL = (EqualTo, EqualNullSafe)
_COMPARISONS = (*_EQUAL, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


class ReadFilter(ReadRange):
    """The range that Spark's filters leave; all entries, until filters are added.

    `columns`: maps each column that filters may name to the one of `stream`, `id`, `id_ms` and `timestamp` that it
    shows.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        super().__init__()
        self._columns = columns

    def add(self, condition: Filter) -> bool:
        """Apply `condition`, as far as possible; False if Spark still has to apply it to the rows."""
        inner = condition.child if isinstance(condition, Not) else condition
        path: tuple[str, ...] = getattr(inner, "attribute", ())
        meta = self._columns.get(path[0]) if len(path) == 1 else None
        if meta == "stream":
            return self._add_test(condition)
        if isinstance(condition, _COMPARISONS) and condition.value is not None:
            return self._compare(meta, condition, condition.value)
        if isinstance(condition, In) and condition.value and meta is not None:
            return self._one_of(path[0], list(condition.value))
        return False

    # --- streams ---

    def _add_test(self, condition: Filter) -> bool:
        test = _name_test(condition)
        if test is not None:
            self.tests.append(test)
        return test is not None

    # --- ids ---

    def _compare(self, shown: str | None, condition: Filter, value: Any) -> bool:
        if shown == "id" and isinstance(condition, _EQUAL) and isinstance(value, str):
            self._intersect(*_only(value))
            return True
        if shown == "id_ms" and isinstance(value, int):
            self._compare_ms(condition, value, value)
            return True
        if shown == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
            # A filter has microseconds, which may fall between the milliseconds of two ids.
            whole, rest = divmod((value - _EPOCH) // timedelta(microseconds=1), 1000)
            self._intersect(ZERO_ID, EntryId(MAX_TIMESTAMP_MS, LAST_ID.seq))
            self._compare_ms(condition, whole, whole + bool(rest))
            return True
        return False

    def _one_of(self, column: str, values: list[Any]) -> bool:
        """Narrow the range to that of the values; Spark applies the filter to the entries within."""
        filters = [ReadFilter(self._columns) for _ in values]
        if all(single.add(EqualTo((column,), value)) for single, value in zip(filters, values, strict=True)):
            self._intersect(min(single.min_id for single in filters), max(single.max_id for single in filters))
        return False

    def _compare_ms(self, condition: Filter, floor: int, ceiling: int) -> None:
        """Compare with a number whose neighbours in whole milliseconds are `floor` and `ceiling`."""
        first = {EqualTo: ceiling, EqualNullSafe: ceiling, GreaterThan: floor + 1, GreaterThanOrEqual: ceiling}
        last = {EqualTo: floor, EqualNullSafe: floor, LessThan: ceiling - 1, LessThanOrEqual: floor}
        kind = type(condition)
        end = EntryId(min(last.get(kind, LAST_ID.ms), LAST_ID.ms), LAST_ID.seq)
        self._intersect(EntryId(max(first.get(kind, 0), 0), 0), end)

    def _intersect(self, min_id: EntryId, max_id: EntryId) -> None:
        self.min_id = max(self.min_id, min_id)
        self.max_id = min(self.max_id, max_id)


def _only(text: str) -> tuple[EntryId, EntryId]:
    """The range of the one id that is written as `text`; an empty range if `text` is no id."""
    with suppress(ConfigError):
        entry_id = EntryId.parse(text)
        if str(entry_id) == text:
            return entry_id, entry_id
    return EntryId(1, 0), ZERO_ID


def _name_test(condition: Filter) -> NameTest | None:
    """The condition as a test of stream names, which are never null; None if it cannot be one."""
    match condition:
        case Not(child):
            test = _name_test(child)
            return None if test is None else lambda name: not test(name)
        case EqualTo(_, str(value)) | EqualNullSafe(_, str(value)):
            return lambda name: name == value
        case In(_, values) if all(isinstance(value, str) for value in values):
            return set(values).__contains__
        case StringStartsWith(_, value):
            return lambda name: name.startswith(value)
        case StringEndsWith(_, value):
            return lambda name: name.endswith(value)
        case StringContains(_, value):
            return lambda name: value in name
    return None
