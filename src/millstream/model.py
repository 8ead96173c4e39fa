"""The data types of millstream: entry ids, messages, keyed state, retry, breaker and limit policy. No I/O."""

import math
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args, overload

from millstream.errors import ConfigError

_MAX = 2**64 - 1
_MAX_DIGITS, _SHOWN = 40, 60


class EntryId(NamedTuple):
    """The id of a stream entry, ordered as Redis orders it.

    Never compare ids as text: "5-10" < "5-9" is true for text and false in Redis (Redis documentation, "Entry IDs").
    """

    ms: int
    seq: int

    @classmethod
    def parse(cls, text: str | bytes, *, default_seq: int = 0) -> "EntryId":
        """Parse `ms-seq`, or `ms` alone, which gets `default_seq`.

        Raises ConfigError for anything else, including parts beyond 64 bits, which Redis rejects.
        """
        plain = text.decode("ascii", "replace") if isinstance(text, bytes) else text
        ms, dash, seq = plain.partition("-")
        digits = ms + seq
        if not (digits.isascii() and digits.isdigit()) or (dash and not seq) or not ms:
            shown = plain if len(plain) <= _SHOWN else f"{plain[:_SHOWN]}..."
            raise ConfigError(f"{shown!r} is not an entry id; write it as milliseconds-sequence, like 1700000000000-0")
        # int() refuses thousands of digits with another error.
        if max(len(ms), len(seq)) > _MAX_DIGITS or int(ms) > _MAX or int(seq or 0) > _MAX:
            raise ConfigError(f"{plain[:_SHOWN]!r} is beyond Redis' largest entry id: neither part may exceed {_MAX}")
        return cls(int(ms), int(seq) if dash else default_seq)

    def previous(self) -> "EntryId":
        """Return the greatest id before this one; 0-0 has none, and is returned."""
        if self.seq:
            return EntryId(self.ms, self.seq - 1)
        return EntryId(self.ms - 1, _MAX) if self.ms else self

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"


ZERO_ID = EntryId(0, 0)
LAST_ID = EntryId(_MAX, _MAX)


@dataclass
class Message:
    """One entry of a stream, as a handler sees it.

    * `stream`, `id`: its stream and entry id; `id` is the text `ms-seq`
    * `pairs`: names and values exactly as published: `[name, value, name, value, ...]`
    * `key`: the bytes that order it; None in a handler without a key
    * `attempt`: 1 for the first run of the handler on it
    * `fence`: fencing token of the current owner (Kleppmann, 2016): pass it to systems that can refuse an older one
    """

    stream: str
    id: str
    pairs: Sequence[bytes]
    key: bytes | None = None
    attempt: int = 1
    fence: int = 0

    @cached_property
    def fields(self) -> dict[str, bytes]:
        """The fields as a mapping; a repeated name keeps its last value, and undecodable names are escaped."""
        pairs = self.pairs
        return {pairs[i].decode("utf-8", "surrogateescape"): pairs[i + 1] for i in range(0, len(pairs), 2)}

    @overload
    def text(self, name: str, default: None = None) -> str | None: ...

    @overload
    def text(self, name: str, default: str) -> str: ...

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return the field `name` as text (invalid UTF-8 is replaced), or `default` if it is absent."""
        value = self.fields.get(name)
        return default if value is None else value.decode("utf-8", "replace")


def value_of(pairs: Sequence[bytes], name: bytes) -> bytes | None:
    """Return the value of the field `name`, None if it is absent; of a repeated one the last, as in `Message.fields`."""
    names = pairs[-2::-2]  # of the last field first; a value may equal the name
    try:
        return pairs[-1 - 2 * names.index(name)]
    except ValueError:
        return None


class State(dict[str, Any]):
    """The durable state of one key of one handler: loaded before, and committed with, each message.

    A plain mapping of text to any msgpack value: text, bytes, numbers, booleans, None, lists and mappings.
    A failed attempt's changes are rolled back. Emptying it removes it from Redis. (The idea: state stores of Kafka
    Streams.)
    """


@dataclass(frozen=True, kw_only=True)
class Retry:
    """Retry policy of a handler: how many attempts a message gets, and the back-off between them.

    * `attempts`: runs in total, the first included (1 = no retry)
    * `delay_ms`: back-off before the second attempt, in milliseconds
    * `factor`: multiplies each further back-off
    * `max_delay_ms`: upper limit of a single back-off, before jitter, in milliseconds
    * `jitter`: each back-off is lengthened by a random share of up to this much (0.1 = 10 %)
    * `then`: what follows the last failed attempt: "dead-letter" the message, and its key goes on; "park" its key until
      an operator acts; "block" the key, and retry without end; or "cancel": the message is dead-lettered, and with it,
      without a run, all messages of its key that were published until then. "cancel" holds for each dead letter of a
      key, also for one without a retry

    Other keys go on while one backs off. Raises ConfigError for values out of range.
    """

    attempts: int = 4
    delay_ms: float = 100.0
    factor: float = 2.0
    max_delay_ms: float = 10_000.0
    jitter: float = 0.1
    then: Literal["dead-letter", "park", "block", "cancel"] = "dead-letter"

    def __post_init__(self) -> None:
        if self.then not in get_args(Retry.__annotations__["then"]):
            raise ConfigError(f'Retry(then={self.then!r}): use "dead-letter", "park", "block" or "cancel"')
        if self.attempts < 1:
            raise ConfigError(f"Retry(attempts={self.attempts}): use 1 or more")
        if self.delay_ms < 0 or self.max_delay_ms < 0 or self.jitter < 0:
            raise ConfigError("Retry: delay_ms, max_delay_ms and jitter must not be negative")
        if self.delay_ms > self.max_delay_ms:
            raise ConfigError(
                f"Retry(delay_ms={self.delay_ms:g}): it is above max_delay_ms={self.max_delay_ms:g}, the limit of every "
                "back-off; raise max_delay_ms"
            )
        if self.factor < 1:
            raise ConfigError(f"Retry(factor={self.factor}): back-off must not shrink; use 1 or more")

    def delay_after(self, attempt: int) -> float:
        """Back-off in milliseconds after the failed `attempt` (1 = the first)."""
        return self._delay(attempt) * (1.0 + self.jitter * random.random())

    def max_delay_after(self, attempt: int) -> float:
        """The largest value that `delay_after` may return, in milliseconds."""
        return self._delay(attempt) * (1.0 + self.jitter)

    def _delay(self, attempt: int) -> float:
        exponent = min(attempt - 1, 64)
        return min(self.delay_ms * self.factor**exponent, self.max_delay_ms)


@dataclass(frozen=True, kw_only=True)
class Breaker:
    """Circuit breaker of a handler: pauses it when nearly all messages become dead letters for the same cause.

    (The pattern: M. Nygard, "Release It!"; its use on dead letters: `DlqLimit` of Arroyo, getsentry.)

    * `first`: it opens when the first so many messages, since a process started or the handler was resumed, have all
      become dead letters for one cause
    * `window`, `share`: it also opens when at least this share (0.9 = 90 %) of the last `window` messages have
    * `retry_after_s`: the pause ends by itself after so many seconds, and the next `first` messages decide whether it
      begins again; None: it lasts until `millstream resume`

    Raises ConfigError for values out of range.
    """

    first: int = 20
    share: float = 0.9
    window: int = 100
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.first < 1 or self.window < self.first:
            raise ConfigError(f"Breaker(first={self.first}, window={self.window}): use 1 <= first <= window")
        if not 0 < self.share <= 1:
            raise ConfigError(f"Breaker(share={self.share}): use a share above 0 and at most 1, like 0.9")
        if self.retry_after_s is not None and not 0 < self.retry_after_s < math.inf:
            raise ConfigError(f"Breaker(retry_after_s={self.retry_after_s}): use seconds above 0, or None")


_PERIODS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)/([smhd])")
_MAX_AT_ONCE = 1_000
_MIN_RATE = 0.000_001


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Limit of a handler, over all its workers and Spark tasks of each stream together.

    (The rate: the generic cell rate algorithm, ITU-T I.371, as in throttled and `Throttle` of Inngest.)

    * `per`: the field whose values are limited each by itself, such as "tenant"; messages without the field share the
      limit of the empty value; None: one limit for all messages
    * `at_once`: how many messages of a value run at the same time, up to 1,000; None for any number
    * `rate`: how many messages of a value begin in a period: "60/m", with s, m, h or d; a number is that a second. They
      are spread evenly. None for any number
    * `cost`: the field with what a message takes of the rate, a number from 0 to the rate; None: each takes 1

    A message that has to wait keeps its place in its key, and uses up no attempt. Raises ConfigError for values out of
    range.
    """

    per: str | None = None
    at_once: int | None = None
    rate: float | str | None = None
    cost: str | None = None

    def __post_init__(self) -> None:
        if self.at_once is None and self.rate is None:
            raise ConfigError('Limit: give it at_once=4, rate="60/m", or both')
        for name in ("per", "cost"):
            found = getattr(self, name)
            if found is not None and not (isinstance(found, str) and found):
                raise ConfigError(f"Limit: {name} must be the name of a field")
        if self.cost is not None and self.rate is None:
            raise ConfigError(f'Limit: cost={self.cost!r} is taken of a rate; add one, like rate="1000/m"')
        if self.at_once is not None and not (type(self.at_once) is int and 1 <= self.at_once <= _MAX_AT_ONCE):
            raise ConfigError(f"Limit: at_once must be a whole number from 1 to {_MAX_AT_ONCE:,}")
        if self.rate is not None and not _MIN_RATE <= self.amount * 1_000 / self.period_ms < math.inf:
            raise ConfigError(f"Limit: rate={self.rate!r} must be at least 0.000001 messages a second")

    @property
    def _parsed_rate(self) -> tuple[float, int]:
        if isinstance(self.rate, (int, float)) and not isinstance(self.rate, bool):
            return min(self.rate, sys.float_info.max), _PERIODS_MS["s"]
        found = _RATE.fullmatch(self.rate) if isinstance(self.rate, str) else None
        if found is None:
            raise ConfigError(f'Limit: rate={self.rate!r} must be like "60/m", with s, m, h or d, or a number a second')
        return float(found[1]), _PERIODS_MS[found[2]]

    @property
    def amount(self) -> float:
        """How much of the rate there is in a period."""
        return self._parsed_rate[0]

    @property
    def period_ms(self) -> int:
        """The period of the rate, in milliseconds."""
        return self._parsed_rate[1]

    @property
    def is_of_messages(self) -> bool:
        """True if it limits messages by a field or while they run, and not only the rate of all of them."""
        return self.per is not None or self.at_once is not None or self.cost is not None
