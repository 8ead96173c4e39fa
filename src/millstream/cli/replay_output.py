"""ReplayOutput: what `millstream replay` prints: how far back each stream goes, each message, and the differences."""

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.admin.key_history import KeptEntries
from millstream.cli.replay_child import TimerReply
from millstream.cli.replay_process import Replayed, Result
from millstream.cli.terminal import print_json, print_line, print_message, print_text, truncate_on_screen
from millstream.handlers.upcasting import parse_state
from millstream.model import EntryId
from millstream.redis_client.escaping import escape, json_fields, json_value
from millstream.redis_client.formats import pluralize
from millstream.redis_client.redaction import redact_text

_SHOWN_CHARS = 200
_PROGRESS_EVERY_S = 0.2
_CLEAR_LINE = "\r\x1b[K"

_NAMES: Mapping[Result, str] = {"dead-letter": "dead letter", "other-key": "gets another key"}
_UNSIMULATED = (
    "not simulated: back-off and when messages ran, other keys, rate, breaker, states that expired or were reset, "
    "messages that were skipped, and writing outputs and timers; after a parked or blocked message it goes on as after "
    "`millstream key skip`"
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What one version of a handler, or two, did with a message."""

    stream: str
    id: str
    versions: Sequence[Replayed]

    @property
    def differs(self) -> bool:
        """Whether two versions differ."""
        return len(self.versions) > 1 and self.versions[0].differs_from(self.versions[1])


class ReplayOutput:
    """Prints what is replayed, one message after another, and counts it. `compared`: there are two versions."""

    def __init__(self, *, key: bytes, compared: bool, as_json: bool) -> None:
        self._key = key
        self._compared = compared
        self._as_json = as_json
        self._results: Counter[Result] = Counter()
        self._first_difference = ""
        self._progress = _Progress()
        self.differing = 0

    @property
    def messages(self) -> int:
        """How many messages were replayed."""
        return self._results.total()

    def begin_stream(self, stream: str, kept: KeptEntries, first: EntryId) -> None:
        """Say how far back a stream is kept, and where the replay begins in it."""
        self._progress.begin_stream(kept.length)
        if self._as_json:
            self._print_json(
                {
                    "event": "stream",
                    "stream": escape(stream),
                    "first_id": str(kept.first),
                    "last_id": str(kept.last),
                    "entries": kept.length,
                    "removed": kept.removed,
                    "only_trimmed": kept.only_trimmed,
                }
            )
            return
        entries = pluralize(kept.removed, "entry", "entries")
        were = "was" if kept.removed == 1 else "were"
        gone = f"{entries} before it {were} trimmed" if kept.only_trimmed else f"{entries} {were} trimmed or deleted"
        since = f"; the replay begins at {first}" if first > kept.first else ""
        self._message(
            f"{escape(stream)} is kept from {kept.first} on; {gone if kept.removed else 'none is gone'}{since}"
        )

    def trimmed_meanwhile(self, stream: str) -> None:
        """Say that entries of a stream were removed while it was read."""
        self._message(
            f"{escape(stream)}: entries were trimmed or deleted meanwhile; messages of the key may be missing"
        )

    def has_read(self, entries: int) -> None:
        """Count entries that were read."""
        self._progress.add(entries, self.messages)

    def show(self, found: Comparison) -> None:
        """Print what became of a message."""
        self._results[found.versions[0].result] += 1
        if found.differs:
            self.differing += 1
            self._first_difference = self._first_difference or found.id
        self._progress.clear()
        if self._as_json:
            self._print_json(self._json_of(found))
        elif not found.differs:
            self._show(found.id, found.versions[0], "  " if self._compared else "")
        else:
            for mark, one in zip("-+", found.versions, strict=True):
                self._show(found.id, one, f"{mark} ")

    def end(self) -> None:
        """Print the totals."""
        self._progress.clear()
        if self._as_json and self.messages:
            counts = {"messages": self.messages, "results": dict(self._results)}
            more = {"differing": self.differing, "first_difference": self._first_difference or None}
            self._print_json({"event": "end", **counts, **(more if self._compared else {})})
        elif self.messages:
            results = ", ".join(f"{count:,} {_NAMES.get(name, name)}" for name, count in self._results.items())
            verb = "differs" if self.differing == 1 else "differ"
            differing = f"; {self.differing:,} {verb}, the first at {self._first_difference}" if self.differing else ""
            same = "; both versions agree" if self._compared and not self.differing else ""
            self._message(f"{pluralize(self.messages, 'message')} of {escape(self._key)}: {results}{differing}{same}")
            self._message(_UNSIMULATED)

    def _show(self, entry_id: str, one: Replayed, mark: str) -> None:
        words = [f"{mark}{entry_id}", _NAMES.get(one.result, one.result)]
        if one.error:
            after = f", {one.attempts:,} attempts" if one.attempts > 1 else ""
            words.append(f"({one.reason or 'failed'}{after}): {redact_text(one.error)}")
        elif one.attempts > 1:
            words.append(f"({one.attempts:,} attempts)")
        line = " ".join(words)
        parts = [f"output {_short(json_fields(pairs)['fields'])}" for pairs in one.outputs]
        parts += [_timer_text(timer) for timer in one.timers]
        if one.takes_state:
            parts.insert(0, f"state {_short(_state_json(one))}")
        print_line("  ".join([line, *parts]))
        if one.traceback:
            print_text(redact_text(one.traceback.rstrip()))

    def _json_of(self, found: Comparison) -> dict[str, Any]:
        line = {"event": "message", "stream": escape(found.stream), "id": found.id, "key": json_value(self._key)}
        old, *new = found.versions
        line |= self._version_json(old)
        return {**line, "new": self._version_json(new[0]), "differs": found.differs} if new else line

    def _version_json(self, one: Replayed) -> dict[str, Any]:
        return {
            "result": one.result,
            "outputs": [json_fields(pairs) for pairs in one.outputs],
            "timers": [
                {"name": timer.name, "delay_ms": timer.delay_ms, **json_fields(timer.pairs)} for timer in one.timers
            ],
            "state": _state_json(one),
            "attempts": one.attempts,
            "reason": one.reason,
            "error": redact_text(one.error),
            "traceback": redact_text(one.traceback),
        }

    def _message(self, text: str) -> None:
        self._progress.clear()
        print_message(text)

    def _print_json(self, line: dict[str, Any]) -> None:
        self._progress.clear()
        print_json(line, flush=True)


def _timer_text(timer: TimerReply) -> str:
    if timer.delay_ms is None:
        return f"timer {timer.name} cancelled"
    return f"timer {timer.name} after {timer.delay_ms:,} ms {_short(json_fields(timer.pairs)['fields'])}"


def _state_json(one: Replayed) -> Any:
    return json_value(parse_state(one.state)) if one.takes_state else None


def _short(value: Any) -> str:
    return truncate_on_screen(json.dumps(value), _SHOWN_CHARS)


class _Progress:
    """A line on the terminal of standard error, if it is one, which `clear` removes before anything else is shown."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()
        self._read = self._of = 0
        self._due_s = 0.0
        self._is_shown = False

    def begin_stream(self, entries: int) -> None:
        self._of += entries

    def add(self, entries: int, messages: int) -> None:
        self._read += entries
        now_s = time.monotonic()
        if self._shows and now_s >= self._due_s:
            sys.stdout.flush()
            text = f"{self._read:,} of {self._of:,} entries read, {pluralize(messages, 'message')} of the key"
            sys.stderr.write(_CLEAR_LINE + text)
            sys.stderr.flush()
            self._due_s, self._is_shown = now_s + _PROGRESS_EVERY_S, True

    def clear(self) -> None:
        if self._is_shown:
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()
            self._is_shown = False
