"""LimitWait: what a key waits for whose first message was refused a permit of its handler's limit."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from millstream.admin.key_queues import KeyQueue
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age, pluralize
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.replies import time_ms_of

_MAX_VALUE_BYTES: Final = 256
_MOST_FIELDS: Final = 100
"""Longer values, and fields behind these, are not looked for among those that a limit counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitWait:
    """The limit that a key waits for.

    * `value`: the value of the limit's field; empty for all messages, or for those without the field
    * `fields`: the fields of the message with this value, one of which the limit counts
    * `running`: how many messages of the value hold a permit; 0 if the limit has no `at_once`
    * `waiting`: how many keys wait for a permit of the value, this one included
    * `rate_wait_ms`: in how many milliseconds the rate lets the next message of the value begin; 0 if it does now
    """

    value: bytes
    fields: tuple[bytes, ...]
    running: int
    waiting: int
    rate_wait_ms: int

    @property
    def text(self) -> str:
        """The limit in words, to follow "the limit of" and a handler."""
        return f"{self._of}: {', '.join(self._figures())}"

    @property
    def _of(self) -> str:
        if not self.value:
            return ""
        return f" for {' or '.join(map(escape, self.fields))} {escape(self.value)}"

    def _figures(self) -> Iterator[str]:
        if self.running:
            yield pluralize(self.running, "message of it runs", "messages of it run")
        if self.rate_wait_ms:
            yield f"its rate lets the next message begin in {format_age(self.rate_wait_ms)}"
        yield pluralize(self.waiting, "key waits for it", "keys wait for it")


def find_limit_wait(client: Client, keys: HandlerKeys, queue: KeyQueue) -> LimitWait | None:
    """Return the limit that a key queue waits for; None if it waits for none. Raises RedisError.

    Redis has the keys that wait by the value, not by the key: so each value of the first message is looked up.
    """
    if queue.state != "backing off" or not queue.first_id:
        return None
    (found,) = call_all(client, [("XRANGE", keys.stream, queue.first_id, queue.first_id)])
    fields_of = _fields_of(found[0][1] if found else ())
    questions = [("ZMSCORE", keys.limited(value), queue.name) for value in fields_of]
    (due,), *replies = call_all(client, [("ZMSCORE", keys.backoff, queue.name), *questions])
    limited = [value for value, (score,) in zip(fields_of, replies, strict=True) if score is not None and score == due]
    return _read(client, keys, limited[0], tuple(fields_of[limited[0]])) if limited else None


def _fields_of(pairs: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    """The fields with each value that a limit may count, the empty one of all messages included."""
    found: dict[bytes, list[bytes]] = defaultdict(list, {b"": []})
    for name, value in zip(pairs[: 2 * _MOST_FIELDS : 2], pairs[1 : 2 * _MOST_FIELDS : 2], strict=True):
        if len(value) <= _MAX_VALUE_BYTES:
            found[value].append(name)
    return found


def _read(client: Client, keys: HandlerKeys, value: bytes, fields: tuple[bytes, ...]) -> LimitWait:
    time, running, waiting, (free_at,) = call_all(
        client,
        [
            ("TIME",),
            ("HLEN", keys.permits(value)),
            ("ZCARD", keys.limited(value)),
            ("HMGET", keys.free_at(value), "at"),
        ],
    )
    wait_ms = max(0, int(float(free_at or 0)) - time_ms_of(time))
    return LimitWait(value=value, fields=fields, running=running, waiting=max(1, waiting), rate_wait_ms=wait_ms)
