"""A word about columns that are null because their fields are written in another case."""

import logging
from collections.abc import Sequence
from functools import cache

logger = logging.getLogger(__name__)

_LEAST_ENTRIES = 300
_LOOKED_AT = 32


def warn_of_other_case(fields: Sequence[Sequence[bytes]], absent: Sequence[str]) -> None:
    """Log a warning, once in this process, for a column in `absent`, which none of the entries with `fields` has, if they
    have one that differs in case only. A few entries prove nothing and are passed over."""
    if not absent or len(fields) < _LEAST_ENTRIES:
        return
    names = {name.decode("utf-8", "replace") for some in fields[:: len(fields) // _LOOKED_AT] for name in some[::2]}
    found = {name.lower(): name for name in names}
    for column in absent:
        if column.lower() in found:
            _tell(column, found[column.lower()])


@cache
def _tell(column: str, field: str) -> None:
    logger.warning(
        "the column %r of the schema is null: entries have no such field, but %r. Write it as they do; case counts",
        column,
        field,
    )
