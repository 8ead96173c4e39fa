"""Upserts: rows as one hash or JSON text per key, which an older row never overwrites."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

from millstream.errors import CommandFailed, ConfigError
from millstream.redis_client.client import Client
from millstream.redis_client.resp import Arg
from millstream.redis_client.scripts import Script

UPSERT = Script("sink/upsert")
_ROWS_PER_TRIP = 1_000

UpsertRow = tuple[str, str, Sequence[Arg]]
"""Key, guard (a whole number or an entry id), and the value: the JSON, or the fields in the form of the script."""


def upsert(
    client: Client,
    kind: Literal["hash", "json"],
    guard_field: str,
    rows: Iterable[UpsertRow],
    *,
    patience_ms: float | None,
) -> int:
    """Write `rows`, except those whose key holds a newer row; return the number of these. May be repeated.

    Raises ConfigError if a key holds a value without a guard, RedisError.
    """
    calls = [(UPSERT, (key,), (kind, guard, guard_field, *stored)) for key, guard, stored in rows]
    older = 0
    for at in range(0, len(calls), _ROWS_PER_TRIP):
        some = calls[at : at + _ROWS_PER_TRIP]
        try:
            replies = client.retry_while_unavailable(
                partial(client.scripts, some), what="the sink", limit_ms=patience_ms
            )
        except CommandFailed as error:
            if error.code == "UNGUARDED":
                raise ConfigError(
                    f"the key {error.detail!r} holds a value that was written without the guard {guard_field!r}, so it "
                    "is not overwritten: use another keyPrefix, or delete the key"
                ) from error
            raise
        older += replies.count(0)
    return older
