"""Dead letters: what is kept of a message that could not be processed, and what can be done about it.

A dead letter is an entry of the handler's dead-letter stream (`HandlerKeys.dead`), written in the same atomic step
that moves the handler past the message, so it is neither lost nor doubled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

Reason = Literal["missing-key", "undecodable", "rejected", "failed", "bad-output", "crashed"]
"""Why a message died.

* `missing-key`: it lacks the field that its handler is keyed by
* `undecodable`: its fields do not fit the handler's model
* `rejected`: the handler raised Reject
* `failed`: the handler raised something else on its last attempt
* `bad-output`: what the handler returned or kept in its state cannot be written
* `crashed`: the process ended each time it was tried
"""

_MAX_TEXT = 4_000


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """One dead letter, with everything needed to understand and to replay it.

    * `stream`, `id`, `pairs`: the original entry, its names and values byte for byte
    * `key`: the key it was ordered by; None where it has none
    * `app`, `handler`, `attempts`: who failed on it, after how many runs
    * `reason`, `error`, `traceback`: why, the last two as text of at most 4,000 characters
    * `time_ms`: when it died, in Unix milliseconds
    * `letter_id`: its id in the dead-letter stream; "" before it is written
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

    def items(self) -> list[bytes | str | int]:
        """Names and values of its entry in the dead-letter stream."""
        key: list[bytes | str | int] = [] if self.key is None else ["key", self.key]
        return [
            *("id", self.id, "stream", self.stream, "app", self.app, "handler", self.handler),
            *key,
            *("reason", self.reason, "error", _clip(self.error), "traceback", _clip(self.traceback)),
            *("attempts", self.attempts, "time_ms", self.time_ms),
            *("fields", msgspec.msgpack.encode(self.pairs)),
        ]

    @classmethod
    def parse(cls, letter_id: bytes, items: Sequence[bytes]) -> "DeadLetter":
        """Read an entry of a dead-letter stream back. Raises KeyError or ValueError if it is not one of ours."""
        values = {items[i].decode(): items[i + 1] for i in range(0, len(items), 2)}
        text = {name: values[name].decode("utf-8", "replace") for name in values if name not in ("key", "fields")}
        return cls(
            stream=text["stream"],
            id=text["id"],
            pairs=msgspec.msgpack.decode(values["fields"], type=list[bytes]),
            key=values.get("key"),
            app=text["app"],
            handler=text["handler"],
            attempts=int(text["attempts"]),
            reason=msgspec.convert(text["reason"], Reason),
            error=text["error"],
            traceback=text["traceback"],
            time_ms=int(text["time_ms"]),
            letter_id=letter_id.decode(),
        )


def _clip(text: str) -> str:
    # The end of a traceback says more than its beginning.
    return text if len(text) <= _MAX_TEXT else "..." + text[-_MAX_TEXT + 3 :]
