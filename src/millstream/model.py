"""The words of millstream: entry ids, messages, keyed state and the retry policy. No I/O."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from millstream.errors import ConfigError

_MOST = 2**64 - 1
_MOST_DIGITS, _SHOWN = 40, 60


class EntryId(NamedTuple):
    """The id of a stream entry, ordered as Redis orders it.

    The text form must never be compared as text: "5-10" < "5-9" is true there and false in Redis
    (Redis documentation, "Entry IDs").
    """

    ms: int
    seq: int

    @classmethod
    def parse(cls, text: str | bytes, *, default_seq: int = 0) -> "EntryId":
        """Read `ms-seq`, or `ms` alone, which gets `default_seq`. Raises ConfigError for anything else.

        So it does for parts beyond 64 bits, which Redis does not take for an id.
        """
        plain = text.decode("ascii", "replace") if isinstance(text, bytes) else text
        ms, dash, seq = plain.partition("-")
        digits = ms + seq
        if not (digits.isascii() and digits.isdigit()) or (dash and not seq) or not ms:
            shown = plain if len(plain) <= _SHOWN else f"{plain[:_SHOWN]}..."
            raise ConfigError(f"{shown!r} is not an entry id; write it as milliseconds-sequence, like 1700000000000-0")
        # Python itself refuses to read thousands of digits, with another error.
        if max(len(ms), len(seq)) > _MOST_DIGITS or int(ms) > _MOST or int(seq or 0) > _MOST:
            raise ConfigError(f"{plain[:_SHOWN]!r} is beyond all ids that Redis has: neither part is above {_MOST}")
        return cls(int(ms), int(seq) if dash else default_seq)

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"


ZERO_ID = EntryId(0, 0)


@dataclass
class Message:
    """One entry of a stream, as a handler sees it.

    * `stream`, `id`: where it stands; `id` is the text `ms-seq`
    * `pairs`: names and values exactly as they were published: `[name, value, name, value, ...]`
    * `key`: the bytes it is ordered by; None in a handler without a key
    * `attempt`: 1 for the first run of the handler on it
    * `fence`: fencing token of the run that holds it: pass it on to systems that can refuse an older one
    """

    stream: str
    id: str
    pairs: Sequence[bytes]
    key: bytes | None = None
    attempt: int = 1
    fence: int = 0

    @cached_property
    def fields(self) -> dict[str, bytes]:
        """The fields as a mapping; of a repeated name the last value stays, undecodable names are escaped."""
        pairs = self.pairs
        return {pairs[i].decode("utf-8", "surrogateescape"): pairs[i + 1] for i in range(0, len(pairs), 2)}

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return the field `name` as text (invalid UTF-8 is replaced), or `default` if it is absent."""
        value = self.fields.get(name)
        return default if value is None else value.decode("utf-8", "replace")


class State(dict[str, Any]):
    """The durable state of one key of one handler: loaded before and committed with each message.

    A plain mapping of text to whatever msgpack can hold: text, bytes, numbers, booleans, None, lists and
    mappings. What a failed attempt changed in it is undone. Emptying it removes it from Redis.
    """


@dataclass(frozen=True, kw_only=True)
class Retry:
    """When a handler fails: how often it is tried in all and how long its key waits in between.

    * `attempts`: runs in all, the first included (1 = no retry)
    * `delay_ms`: wait before the second attempt, in milliseconds
    * `factor`: each further wait is this many times longer
    * `max_delay_ms`: no single wait is longer, in milliseconds
    * `jitter`: each wait is lengthened by a random share of up to this much (0.1 = 10 %)
    * `then`: what becomes of a message whose attempts have all failed: it is a "dead-letter" and its key goes on; or
      its key is kept waiting until a person decides ("park"); or it is tried again and again ("block")

    Other keys go on while one waits. Raises ConfigError for values that make no sense.
    """

    attempts: int = 4
    delay_ms: float = 100.0
    factor: float = 2.0
    max_delay_ms: float = 10_000.0
    jitter: float = 0.1
    then: Literal["dead-letter", "park", "block"] = "dead-letter"

    def __post_init__(self) -> None:
        if self.then not in get_args(Retry.__annotations__["then"]):
            raise ConfigError(f'Retry(then={self.then!r}): use "dead-letter", "park" or "block"')
        if self.attempts < 1:
            raise ConfigError(f"Retry(attempts={self.attempts}): at least 1 attempt is needed")
        if self.delay_ms < 0 or self.max_delay_ms < 0 or self.jitter < 0:
            raise ConfigError("Retry: delay_ms, max_delay_ms and jitter must not be negative")
        if self.factor < 1:
            raise ConfigError(f"Retry(factor={self.factor}): waits must not get shorter; use 1 or more")

    def delay_after(self, attempt: int) -> float:
        """Milliseconds to wait after the failed `attempt` (1 = the first)."""
        return self._delay(attempt) * (1.0 + self.jitter * random.random())

    def longest_delay_after(self, attempt: int) -> float:
        """The most milliseconds that `delay_after` may return."""
        return self._delay(attempt) * (1.0 + self.jitter)

    def _delay(self, attempt: int) -> float:
        exponent = min(attempt - 1, 64)
        return min(self.delay_ms * self.factor**exponent, self.max_delay_ms)
