"""LimitWait: what a key waits for whose first message was refused a permit of its handler's limit."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from millstream.admin.key_queues import KeyQueue, explain
from millstream.delivery.last_error import LastError
from millstream.delivery.running_code import read_code
from millstream.errors import AccessDenied, WrongType
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age, pluralize
from millstream.redis_client.key_names import HandlerKeys, to_wire
from millstream.redis_client.pipelining import send_all
from millstream.redis_client.replies import time_ms_of
from millstream.redis_client.resp import Command, Reply

_MAX_VALUE_BYTES: Final = 256
_MOST_FIELDS: Final = 100
"""Longer values, and fields behind these, are not looked for among those that a limit counts."""
_QUEUES_PER_READ: Final = 20
"""Of so many queues the first messages are in memory at once."""


ShowValue = Callable[[Sequence[str], bytes], str]
"""Gets a value and the names of the fields that have it, escaped, and returns the text to show."""


def show_value(names: Sequence[str], value: bytes) -> str:  # noqa: ARG001 - as every ShowValue
    """A ShowValue that hides nothing."""
    return escape(value)


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

    def describe(self, handler: str, show: ShowValue = show_value) -> str:
        """What a key of the handler waits for, in words that follow the key."""
        return f"waits for the limit of {handler}{self._of(show)}: {', '.join(self._figures())}"

    def _of(self, show: ShowValue) -> str:
        if not self.value:
            return ""
        names = [escape(one) for one in self.fields]
        return f" for {' or '.join(names)} {show(names, self.value)}"

    def _figures(self) -> Iterator[str]:
        if self.running:
            yield pluralize(self.running, "message of it runs", "messages of it run")
        if self.rate_wait_ms:
            yield f"its rate lets the next message begin in {format_age(self.rate_wait_ms)}"
        yield pluralize(self.waiting, "key waits for it", "keys wait for it")


def explain_wait(
    keys: HandlerKeys, queue: KeyQueue, last: LastError, limit: LimitWait | None, show: ShowValue = show_value
) -> str:
    """Return what a key queue waits for, in words, its limit included; `last`: its last error, as far as it is known."""
    why = explain(queue, last)
    return why if limit is None else f"{why}; it {limit.describe(keys.label, show)}"


def find_limit_waits(client: Client, queues: Sequence[tuple[HandlerKeys, KeyQueue]]) -> list[LimitWait | None]:
    """Return the limit that each of these key queues waits for; None if it waits for none. Raises RedisError.

    Redis has the keys that wait by the value, not by the key: so each value of the first message is looked up. What this user
    may not read, or another program has written, names no limit. Nothing is looked up where the running code has none.
    """
    waiting = [(keys, one) for keys, one in queues if one.state == "backing off" and one.first_id]
    unlimited = _without_limit(client, {(keys.app, keys.handler) for keys, _ in waiting}) if waiting else ()
    waiting = [(keys, one) for keys, one in waiting if (keys.app, keys.handler) not in unlimited]
    found: dict[tuple[HandlerKeys, bytes], LimitWait] = {}
    for start in range(0, len(waiting), _QUEUES_PER_READ):
        limited = _find_values(client, waiting[start : start + _QUEUES_PER_READ])
        waits = _read(client, [(keys, value, fields) for keys, _, value, fields in limited])
        found |= {(keys, name): wait for (keys, name, _, _), wait in zip(limited, waits, strict=True) if wait}
    return [found.get((keys, one.name)) for keys, one in queues]


def _without_limit(client: Client, handlers: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of the handlers, by app and name, whose code runs and has no limit, in any of its versions that run."""
    running = read_code(client, handlers)
    return {name for name, codes in running.items() if codes and not any("limit" in one.settings for one in codes)}


def _find_values(
    client: Client, queues: Sequence[tuple[HandlerKeys, KeyQueue]]
) -> list[tuple[HandlerKeys, bytes, bytes, tuple[bytes, ...]]]:
    """Of each of these key queues that waits for its limit: its name, the value, and the fields with that value."""
    entries = _read_all(client, [("XRANGE", keys.stream, one.first_id, one.first_id) for keys, one in queues])
    fields_by_value = [_fields_of(found[0][1] if found else ()) for found in entries]
    questions = [
        ("ZMSCORE", key, one.name)
        for (keys, one), by_value in zip(queues, fields_by_value, strict=True)
        for key in (to_wire(keys.backoff), *map(keys.limited, by_value))
    ]
    replies = iter(_read_all(client, questions))
    limited = []
    for (keys, one), by_value in zip(queues, fields_by_value, strict=True):
        due, *scores = islice(replies, 1 + len(by_value))
        values = [
            value for value, score in zip(by_value, scores, strict=True) if score == due and score not in (None, [None])
        ]
        limited += [(keys, one.name, value, tuple(by_value[value])) for value in values[:1]]
    return limited


def _read_all(client: Client, commands: Sequence[Command]) -> list[Reply]:
    """The replies; None where this user may not read, or another program has written. Raises RedisError."""
    replies = send_all(client, commands)
    return [None if isinstance(one, AccessDenied | WrongType) else raise_if_error(one) for one in replies]


def _fields_of(pairs: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    """The fields with each value that a limit may count, the empty one of all messages included."""
    found: dict[bytes, list[bytes]] = defaultdict(list, {b"": []})
    for name, value in zip(pairs[: 2 * _MOST_FIELDS : 2], pairs[1 : 2 * _MOST_FIELDS : 2], strict=True):
        if len(value) <= _MAX_VALUE_BYTES:
            found[value].append(name)
    return found


def _read(client: Client, limited: Sequence[tuple[HandlerKeys, bytes, tuple[bytes, ...]]]) -> list[LimitWait | None]:
    questions = [
        question
        for keys, value, _ in limited
        for question in (
            ("TIME",),
            ("HLEN", keys.permits(value)),
            ("ZCARD", keys.limited(value)),
            ("HMGET", keys.free_at(value), "at"),
        )
    ]
    replies = iter(_read_all(client, questions))
    return [
        None if None in figures else _describe(value, fields, *figures)
        for (_, value, fields), *figures in zip(limited, replies, replies, replies, replies, strict=True)
    ]


def _describe(
    value: bytes, fields: tuple[bytes, ...], time: Reply, running: int, waiting: int, free_at: Sequence[bytes | None]
) -> LimitWait:
    return LimitWait(
        value=value,
        fields=fields,
        running=running,
        waiting=max(1, waiting),
        rate_wait_ms=max(0, int(float(free_at[0] or 0)) - time_ms_of(time)),
    )
