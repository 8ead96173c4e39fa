"""DeadLetter: a message that could not be processed, with its entry, its error and its origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from millstream.errors import ConfigError
from millstream.model import EntryId
from millstream.redis_client.key_names import from_wire
from millstream.redis_client.redaction import redact_text
from millstream.redis_client.resp import Arg

Reason = Literal["missing-key", "undecodable", "rejected", "failed", "bad-output", "crashed", "skipped", "canceled"]
"""Why a message was dead-lettered.

* `missing-key`: it lacks the field that its handler is keyed by
* `undecodable`: its fields do not fit the handler's model
* `rejected`: the handler raised Reject
* `failed`: the handler raised something else on its last attempt
* `bad-output`: the handler's output or state cannot be written
* `crashed`: the process ended in each attempt
* `skipped`: an operator skipped it, so that its key goes on
* `canceled`: an earlier message of its key became a dead letter, under `Retry(then="cancel")`
"""

_MAX_TEXT = 4_000
_NO_TEXT = ("key", "fields", "before_edit")
_MAX_ATTEMPTS = 2**31
_MAX_MS = 253_402_300_799_999
"""The last millisecond of the year 9999, the last of `datetime`."""


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """One dead letter, with everything needed to understand and to redrive it.

    * `stream`, `id`, `pairs`: the original entry, its names and values byte for byte
    * `key`: the key it was ordered by; None without one
    * `app`, `handler`, `attempts`: the handler that failed on it, and its number of attempts
    * `reason`, `error`, `traceback`: why; the last two are text of at most 4,000 characters, without passwords in URLs
    * `time_ms`: when it was dead-lettered, in Unix milliseconds
    * `letter_id`: its id in the dead-letter stream; "" before it is written
    * `pairs_before_edit`: of the dead letter of an edited copy: the fields that the message had before its edits; None
      for any other, and if the dead letter before it was purged while the copy was under way

    Raises ConfigError for an unknown reason: such a letter could not be listed, read or redriven.
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
    pairs_before_edit: Sequence[bytes] | None = None

    def __post_init__(self) -> None:
        if self.reason not in get_args(Reason):
            raise ConfigError(
                f"a dead letter cannot have the reason {self.reason!r}: use one of {', '.join(get_args(Reason))}, and put "
                "details into `error`"
            )

    def items(self) -> list[bytes | str | int]:
        """Return the names and values of its entry in the dead-letter stream, `id` first.

        Without the fields before its edits: they are added where it is written.
        """
        key: list[bytes | str | int] = [] if self.key is None else ["key", self.key]
        return [
            *("id", self.id, "stream", self.stream, "app", self.app, "handler", self.handler),
            *key,
            *(
                "reason",
                self.reason,
                "error",
                _clip(redact_text(self.error)),
                "traceback",
                _clip(redact_text(self.traceback)),
            ),
            *("attempts", self.attempts, "time_ms", self.time_ms),
            *("fields", msgspec.msgpack.encode(self.pairs)),
        ]

    @classmethod
    def parse(cls, letter_id: bytes, items: Sequence[bytes]) -> "DeadLetter":
        """Parse an entry of a dead-letter stream. Raises KeyError, ValueError or ConfigError for any other entry."""
        values = {items[i].decode(): items[i + 1] for i in range(0, len(items), 2)}
        text = {name: values[name].decode("utf-8", "replace") for name in values if name not in _NO_TEXT}
        before = values.get("before_edit")
        return cls(
            stream=from_wire(values["stream"]),
            id=str(EntryId.parse(text["id"])),
            pairs=_unpack(values["fields"]),
            key=values.get("key"),
            app=text["app"],
            handler=text["handler"],
            attempts=_number(text, "attempts", _MAX_ATTEMPTS),
            reason=msgspec.convert(text["reason"], Reason),
            error=text["error"],
            traceback=text["traceback"],
            time_ms=_number(text, "time_ms", _MAX_MS),
            letter_id=letter_id.decode(),
            pairs_before_edit=None if before is None else _unpack(before),
        )


def _unpack(packed: bytes) -> list[bytes]:
    """Unpack names and values as `DeadLetter.items` packs them. Raises ValueError for anything else."""
    pairs = msgspec.msgpack.decode(packed, type=list[bytes])
    if len(pairs) % 2:
        raise ValueError("its fields are not pairs of name and value")
    return pairs


def reason_of(items: Sequence[Arg]) -> str:
    """Return the reason in the result of `DeadLetter.items`."""
    return str(items[items.index("reason") + 1])


def _number(text: Mapping[str, str], name: str, limit: int) -> int:
    """Parse a number as `DeadLetter.items` writes it. Raises ValueError for any other text."""
    digits = text[name]
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(limit)) and int(digits) <= limit):
        raise ValueError(f"its {name} is not a number up to {limit:,}")
    return int(digits)


def _clip(text: str) -> bytes:
    # The end of a traceback is kept, as it has the error. An error may quote bytes that are not valid text.
    clipped = text if len(text) <= _MAX_TEXT else "..." + text[-_MAX_TEXT + 3 :]
    return clipped.encode("utf-8", "backslashreplace")
