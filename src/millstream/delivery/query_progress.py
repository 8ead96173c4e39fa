"""QueryProgress: the last micro-batch of a query on Spark, reported so that operators see it without Spark's pages."""

from collections.abc import Iterable, Mapping

import msgspec

from millstream.errors import AccessDenied, WrongType
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import query_progress_key
from millstream.redis_client.pipelining import send_all

HELD_MS = 30_000
"""How long a report is kept, unless it is repeated."""


class QueryProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What Spark reports of the last micro-batch of a query (StreamingQueryProgress), and how often the query failed.

    * `batch`: its number; `rows`: the rows that it read; `rows_per_s`: how many a second; `took_ms`: its duration in
      milliseconds; `began_ms`: when it began, in Unix milliseconds; None for all if no micro-batch has ended in this run
    * `failures`: failures in a row without a commit in between, the first of them at `failing_since_ms` (Unix
      milliseconds; None without a failure); `last_failure`: why the last one of this run failed, "" if none has
    * `ui`: address of Spark's page of the run; None if it has none
    """

    batch: int | None = None
    rows: int | None = None
    rows_per_s: float | None = None
    took_ms: int | None = None
    began_ms: int | None = None
    failures: int = 0
    failing_since_ms: int | None = None
    last_failure: str = ""
    ui: str | None = None


def report_progress(client: Client, app: str, found: Mapping[str, QueryProgress]) -> None:
    """Report the progress of queries by their names; repeat it before `HELD_MS`. Raises RedisError."""
    packed = {name: msgspec.msgpack.encode(one) for name, one in found.items()}
    for reply in client.pipeline(
        [("SET", query_progress_key(app, name), one, "PX", HELD_MS) for name, one in packed.items()]
    ):
        raise_if_error(reply)


def read_progress(client: Client, queries: Iterable[tuple[str, str]]) -> dict[tuple[str, str], QueryProgress]:
    """The reported progress of queries, by app and name. Raises RedisError.

    Leaves out those that this user may not read, and what another program has written there.
    """
    asked = list(queries)
    found: dict[tuple[str, str], QueryProgress] = {}
    replies = send_all(client, [("GET", query_progress_key(app, name)) for app, name in asked])
    for query, reply in zip(asked, replies, strict=True):
        if isinstance(reply, AccessDenied | WrongType) or (packed := raise_if_error(reply)) is None:
            continue
        try:
            found[query] = msgspec.msgpack.decode(packed, type=QueryProgress)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return found
