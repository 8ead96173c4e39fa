"""KeyDetails: one key of a handler: why it waits, what waits, its state and its dead letters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millstream.admin.inspection import read_state, state_expiry
from millstream.admin.key_explanation import KeyReport
from millstream.admin.key_inspection import inspect_key
from millstream.delivery.keyed_stream import queue_of_key
from millstream.errors import CommandFailed, DecodeError
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import HandlerKeys, to_wire
from millstream.redis_client.pipelining import send_all


@dataclass(frozen=True, kw_only=True)
class WaitingEntry:
    """An entry of a key queue: its id and its names and values; None if it is gone from the stream."""

    id: str
    pairs: Sequence[bytes] | None


@dataclass(frozen=True, kw_only=True)
class KeyDetails:
    """One key of a handler on one stream.

    * `report`: what `millstream why` explains
    * `entries`: the first entries of its queue
    * `state`: None if it has none; `state_problem`: why the state cannot be read; `expires_ms`: when the state expires,
      in Unix milliseconds
    """

    keys: HandlerKeys
    report: KeyReport
    entries: Sequence[WaitingEntry]
    state: dict[str, Any] | None
    state_problem: str | None
    expires_ms: int | None

    @property
    def has_content(self) -> bool:
        """Whether the key has messages that wait, a state or dead letters."""
        return bool(self.report.queue or self.state or self.state_problem or self.report.dead_letters)


def read_key(
    client: Client, places: Sequence[HandlerKeys], key: bytes, *, is_only: bool, most: int = 20
) -> list[KeyDetails]:
    """Read a key of a handler on these streams, with at most `most` entries of each.

    `is_only`: whether the handler has run on one stream alone. Raises MillstreamError if the handler has no key, and
    RedisError.
    """
    by_stream = {keys.stream: keys for keys in places}
    found = inspect_key(client, places, key, is_only=is_only)
    return [_read(client, by_stream[one.handler.stream], one, most) for one in found]


def _read(client: Client, keys: HandlerKeys, report: KeyReport, most: int) -> KeyDetails:
    state, problem = None, None
    try:
        state = read_state(client, keys, report.key)
    except DecodeError as error:
        problem = str(error)
    return KeyDetails(
        keys=keys,
        report=report,
        entries=_first_entries(client, keys, queue_of_key(report.key, b""), most) if report.queue else (),
        state=state,
        state_problem=problem,
        expires_ms=state_expiry(client, keys, report.key),
    )


def _first_entries(client: Client, keys: HandlerKeys, name: bytes, most: int) -> list[WaitingEntry]:
    ids = client.execute("LRANGE", keys.queue(name), 0, most - 1)
    found = send_all(client, [("XRANGE", to_wire(keys.stream), one, one) for one in ids])
    # Redis refuses an id of a damaged queue, and knows no entry of it.
    known = [None if isinstance(one, CommandFailed) else raise_if_error(one) for one in found]
    return [
        WaitingEntry(id=escape(one), pairs=entries[0][1] if entries else None)
        for one, entries in zip(ids, known, strict=True)
    ]
