"""Dead letters as JSON: one, and an export of many, which is read in parts of about a million bytes."""

import json
from collections.abc import Sequence
from typing import Any

from millstream.admin.dead_letter_groups import fingerprint_of
from millstream.admin.value_redaction import Redact, show_all
from millstream.delivery.dead_letter_queue import DeadLetterEntry, DeadLetterFilter, DeadLetterQueue
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape, json_fields, json_value
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.replies import pairs_of

_MOST_BYTES = 1_000_000
_FIRST_COUNT, _MOST_AT_ONCE, _MOST_READS = 5, 50, 20


def letter_json(entry: DeadLetterEntry, *, full: bool = False, redact: Redact = show_all) -> dict[str, Any]:
    """A dead letter for JSON, lossless; with its fields and its traceback if `full`."""
    keys, letter = entry.keys, entry.letter
    head = {"letter_id": entry.letter_id, "app": keys.app, "handler": keys.handler, "stream": keys.stream}
    if letter is None:
        error = redact("error", entry.problem)
        return {**head, "reason": entry.reason, "error": error, **json_fields(_hidden(entry.pairs, redact))}
    content = (
        {"traceback": redact("traceback", letter.traceback), **json_fields(_hidden(letter.pairs, redact))}
        if full
        else {}
    )
    if full and letter.pairs_before_edit is not None:
        content["before_edit"] = json_fields(_hidden(letter.pairs_before_edit, redact))
    return {
        **head,
        "id": letter.id,
        "key": json_value(None if letter.key is None else _hidden_value("key", letter.key, redact)),
        "reason": letter.reason,
        "error": redact("error", letter.error),
        "attempts": letter.attempts,
        "at_ms": letter.time_ms,
        "copy_id": entry.copy_id or None,
        **content,
    }


class LetterExport:
    """The dead letters of a handler as lines of JSON, part by part, so that memory does not grow with their number.

    `reason`, `fingerprint`: only those of a group. `next_part` raises RedisError, and may be called from any thread,
    but by one at a time.
    """

    def __init__(
        self,
        client: Client,
        wanted: DeadLetterFilter,
        *,
        fingerprint: str | None = None,
        redact: Redact = show_all,
    ) -> None:
        self.count = 0
        """How many were exported so far."""
        self._wanted = wanted
        self._fingerprint = fingerprint
        self._redact = redact
        self._places = DeadLetterQueue(client).handlers(wanted)
        self._after = "0-0"
        self._at_once = _FIRST_COUNT

    def next_part(self, client: Client) -> bytes | None:
        """The next lines; b"" if all that were read are of other groups; None at the end."""
        if not self._places:
            return None
        part = bytearray()
        for _ in range(_MOST_READS):
            part += self._read(client, self._places[0])
            if not self._places or len(part) >= _MOST_BYTES:
                break
        return bytes(part)

    def _read(self, client: Client, keys: HandlerKeys) -> bytes:
        found = DeadLetterQueue(client).read_after(keys, self._after, self._at_once)
        if len(found) < self._at_once:
            del self._places[0]
            self._after = "0-0"
        else:
            self._after = found[-1].letter_id
        lines = [
            json.dumps(letter_json(one, full=True, redact=self._redact), separators=(",", ":")).encode() + b"\n"
            for one in found
            if one.matches(self._wanted) and self._fingerprint in (None, fingerprint_of(one))
        ]
        self.count += len(lines)
        size = sum(map(_size_of, found))
        self._at_once = min(_MOST_AT_ONCE, max(1, _MOST_BYTES * len(found) // max(1, size)))
        return b"".join(lines)


def _size_of(entry: DeadLetterEntry) -> int:
    letter = entry.letter
    pairs = entry.pairs if letter is None else (*letter.pairs, *(letter.pairs_before_edit or ()))
    return sum(map(len, pairs))


def _hidden(pairs: Sequence[bytes], redact: Redact) -> list[bytes]:
    return [one for name, value in pairs_of(pairs) for one in (name, _hidden_value(escape(name), value, redact))]


def _hidden_value(name: str, value: bytes, redact: Redact) -> bytes:
    """The value, or the text that stands for it: exactly the value if nothing is hidden."""
    text = escape(value)
    shown = redact(name, text)
    return value if shown == text else shown.encode("utf-8", "surrogateescape")
