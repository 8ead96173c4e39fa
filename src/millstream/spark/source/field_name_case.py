"""Warns when a column is null because the field name differs in case."""

import logging
from collections.abc import Sequence
from functools import cache

from millstream.spark.source.entry_segment import EntrySegment

logger = logging.getLogger(__name__)

_MIN_ENTRIES = 300
_SAMPLED = 32


def warn_of_other_case(fields: EntrySegment | Sequence[Sequence[bytes]], absent: Sequence[str]) -> None:
    """Warn, once in this process, of each column in `absent` that differs only in case from a field name in `fields`.

    `fields`: of each entry; none of them has a field in `absent`. Fewer than 300 entries prove nothing and are ignored.
    """
    if not absent or len(fields) < _MIN_ENTRIES:
        return
    names = {name.decode("utf-8", "replace") for some in fields[:: len(fields) // _SAMPLED] for name in some[::2]}
    found = {name.lower(): name for name in names}
    for column in absent:
        if column.lower() in found:
            _warn(column, found[column.lower()])


@cache
def _warn(column: str, field: str) -> None:
    logger.warning(
        "the column %r of the schema is null: entries have no such field, but %r; use the field's name in the schema",
        column,
        field,
    )
