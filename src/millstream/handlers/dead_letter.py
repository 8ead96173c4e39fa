"""A dead letter: what is kept of a message that could not be processed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from millstream.errors import ConfigError
from millstream.model import EntryId
from millstream.redis_client.client import Arg
from millstream.redis_client.redaction import redacted

Reason = Literal["missing-key", "undecodable", "rejected", "failed", "bad-output", "crashed", "skipped"]
"""Why a message died.

* `missing-key`: it lacks the field that its handler is keyed by
* `undecodable`: its fields do not fit the handler's model
* `rejected`: the handler raised Reject
* `failed`: the handler raised something else on its last attempt
* `bad-output`: what the handler returned or kept in its state cannot be written
* `crashed`: the process ended each time it was tried
* `skipped`: a person had its key pass over it
"""


_MAX_TEXT = 4_000


_MOST_ATTEMPTS = 2**31


_LAST_MS = 253_402_300_799_999
"""The last millisecond of the year 9999, which dates go up to."""


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """One dead letter, with everything needed to understand and to replay it.

    * `stream`, `id`, `pairs`: the original entry, its names and values byte for byte
    * `key`: the key it was ordered by; None where it has none
    * `app`, `handler`, `attempts`: who failed on it, after how many runs
    * `reason`, `error`, `traceback`: why, the last two as text of at most 4,000 characters, without passwords in URLs
    * `time_ms`: when it died, in Unix milliseconds
    * `letter_id`: its id in the dead-letter stream; "" before it is written

    Raises ConfigError for a reason that there is not: nobody could list, read or send back such a letter.
    """

    stream: str
    id: str
    pairs: Sequence[bytes]
    key: bytes | None
    app: str
    handler: str
    attempts: int
    reason: Reason
    error: str
    traceback: str = ""
    time_ms: int
    letter_id: str = ""

    def __post_init__(self) -> None:
        if self.reason not in get_args(Reason):
            raise ConfigError(
                f"a dead letter cannot have the reason {self.reason!r}: take one of {', '.join(get_args(Reason))}, and say "
                "in `error` what is special about it"
            )

    def items(self) -> list[bytes | str | int]:
        """Names and values of its entry in the dead-letter stream."""
        key: list[bytes | str | int] = [] if self.key is None else ["key", self.key]
        return [
            *("id", self.id, "stream", self.stream, "app", self.app, "handler", self.handler),
            *key,
            *(
                "reason",
                self.reason,
                "error",
                _clip(redacted(self.error)),
                "traceback",
                _clip(redacted(self.traceback)),
            ),
            *("attempts", self.attempts, "time_ms", self.time_ms),
            *("fields", msgspec.msgpack.encode(self.pairs)),
        ]

    @classmethod
    def parse(cls, letter_id: bytes, items: Sequence[bytes]) -> "DeadLetter":
        """Read an entry of a dead-letter stream back. Raises KeyError, ValueError or ConfigError if it is not one of ours."""
        values = {items[i].decode(): items[i + 1] for i in range(0, len(items), 2)}
        text = {name: values[name].decode("utf-8", "replace") for name in values if name not in ("key", "fields")}
        pairs = msgspec.msgpack.decode(values["fields"], type=list[bytes])
        if len(pairs) % 2:
            raise ValueError("its fields are not names and values in turn")
        return cls(
            stream=text["stream"],
            id=str(EntryId.parse(text["id"])),
            pairs=pairs,
            key=values.get("key"),
            app=text["app"],
            handler=text["handler"],
            attempts=_number(text, "attempts", _MOST_ATTEMPTS),
            reason=msgspec.convert(text["reason"], Reason),
            error=text["error"],
            traceback=text["traceback"],
            time_ms=_number(text, "time_ms", _LAST_MS),
            letter_id=letter_id.decode(),
        )


def reason_of(items: Sequence[Arg]) -> str:
    """The reason in the items of a dead letter that was made here."""
    return str(items[items.index("reason") + 1])


def _number(text: Mapping[str, str], name: str, most: int) -> int:
    """A number as it was written. Raises ValueError for what nobody here has written."""
    digits = text[name]
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(most)) and int(digits) <= most):
        raise ValueError(f"its {name} is no number up to {most:,}")
    return int(digits)


def _clip(text: str) -> bytes:
    # The end of a traceback says more than its beginning. An error may quote what is no valid text.
    clipped = text if len(text) <= _MAX_TEXT else "..." + text[-_MAX_TEXT + 3 :]
    return clipped.encode("utf-8", "backslashreplace")
