"""Events, the files that have them, and the order that they have."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from os import SEEK_END, PathLike, fspath, fsync
from pathlib import Path
from sys import intern
from typing import Any, Literal

import msgspec

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError

Kind = Literal[
    "enqueued", "started", "ended", "committed", "fenced", "dead", "timer_set", "timer_canceled", "timer_came"
]

_TORN = b"#torn"
_ESCAPE = re.compile(rb"\\(?:\\|x[0-9a-f]{2})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of a history.

    * `kind`: `enqueued` into the stream; `started` and `ended`: one run of the handler; its effects:
      `committed`, or `dead` (the dead letter is written); `fenced`: a commit that the server refused; `timer_set` and
      `timer_canceled`: what a commit did with a timer of its key; `timer_came`: the timer has added its message
    * `stream`, `id`: the entry; `id` is the text `ms-seq`. For a timer, also one that came: the entry whose commit has
      set it, or canceled it
    * `key`: the key that orders it; None = unordered or, for a handler's event, the key of the `enqueued` event
    * `handler`: name of the handler; unused in `enqueued`
    * `worker`: name of the owner, unique among concurrent ones
    * `token`: its fencing token: every later owner of the key has a higher one
    * `at`: time in milliseconds of a monotonic clock that the compared writers share; None without one. Of a timer's
      events: the time of the server, that of the commit or that of the timer's own entry
    * `position`: index of an effect in the log that orders the effects of its key, such as the output stream
    * `timer`: name of the timer. A timer belongs to a stream, a handler, a key and a name: setting it again replaces it
    * `due`: in `timer_set`, when the timer is due, by the clock of `at`
    * `limited`: in `started`, the value of the field by which the handler is limited, such as the tenant
    * `cost`: in `started`, what the run takes of the rate
    * `asked`: in `started`, a time before the run was permitted, by the clock of `at`: it was between the two. None: at `at`
    * `note`: free text for the reader
    """

    kind: Kind
    stream: str
    id: str
    key: bytes | None = None
    handler: str = ""
    worker: str = ""
    token: int | None = None
    at: float | None = None
    position: int | None = None
    timer: str = ""
    due: float | None = None
    limited: str = ""
    cost: float = 1.0
    asked: float | None = None
    note: str = ""


_FIELDS = tuple((field.name, field.default) for field in fields(Event))


class Recorder:
    """Appends events to a file, one JSON line each, so that a killed process leaves complete lines.

    * `path`: a file of this process alone; a restarted process may append to the same one
    * `sync`: fsync after each event, so that it survives a power failure too, at about a millisecond each
    * `clock`: stamps events that have no `at`; None if the writers are on several machines

    Each event is one unbuffered `write` to a file opened with O_APPEND: threads may share a recorder, and SIGKILL
    truncates the last line at most. Raises OSError if the disk takes only part of a line.
    """

    def __init__(self, path: str | PathLike[str], *, sync: bool = False, clock: Clock | None = SYSTEM_CLOCK) -> None:
        self._sync = sync
        self._clock = clock
        self._file = Path(path).open("ab+", buffering=0)  # noqa: SIM115 - closed by close()
        self._mark_torn_line()

    def record(self, event: Event) -> None:
        """Write `event`; once this returns, the event survives the process."""
        line = {name: value for name, default in _FIELDS if (value := getattr(event, name)) != default}
        if event.key is not None:
            line["key"] = escape(event.key)
        if event.at is None and self._clock is not None:
            line["at"] = self._clock.monotonic_ms()
        data = msgspec.json.encode(line) + b"\n"
        if self._file.write(data) != len(data):
            raise OSError(f"{self._file.name}: only part of an event was written: is the disk full?")
        if self._sync:
            fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Events are not buffered until then."""
        self._file.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mark_torn_line(self) -> None:
        size = self._file.seek(0, SEEK_END)
        if size == 0:
            return
        self._file.seek(size - 1)
        if self._file.read(1) != b"\n":
            # Appended to a torn line, the next event would be lost with it.
            self._file.write(_TORN + b"\n")


@dataclass(frozen=True, kw_only=True)
class EventLog:
    """The events read, and the torn lines between them, as `source:line`."""

    events: Sequence[Event]
    torn: Sequence[str]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)


def read_events(*sources: str | PathLike[str] | Iterable[str | bytes]) -> EventLog:
    """Read JSON lines from paths of files and iterables of lines, one after the other.

    A line is an object with the fields of `Event`. Fields at their default may be absent; unknown fields are ignored.
    `key` is UTF-8 text; in it, a backslash is `\\\\`, and a byte that is not UTF-8 is `\\xNN`.
    An incomplete line of a killed process is skipped and listed in `torn`.
    Raises OSError for an unreadable file, ConfigError for any other line that is not an event.
    """
    events: list[Event] = []
    torn: list[str] = []
    for source in sources:
        if isinstance(source, str | PathLike):
            with Path(source).open("rb") as lines:
                _read_lines(str(fspath(source)), lines, events, torn)
        else:
            _read_lines("lines", source, events, torn)
    return EventLog(events=events, torn=torn)


def _read_lines(name: str, lines: Iterable[str | bytes], events: list[Event], torn: list[str]) -> None:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    rest = iter(lines)
    for number, text in enumerate(rest, 1):
        line = text.encode() if isinstance(text, str) else text
        content = line.rstrip()
        if not content:
            continue
        try:
            events.append(_event(decode(content.removesuffix(_TORN))))
        except msgspec.DecodeError as error:
            marked = content.endswith(_TORN)
            cut_off = not line.endswith(b"\n") and next(rest, None) is None
            if isinstance(error, msgspec.ValidationError) or not (marked or cut_off):
                raise ConfigError(f"{name}:{number}: {error}; correct or remove this line") from error
            torn.append(f"{name}:{number}")


def _event(line: dict[str, Any]) -> Event:
    for name, value in line.items():
        if not isinstance(value, str):
            continue
        if name == "key":
            line[name] = _unescape(value)
        elif name != "id":
            # A million events share a few names: one object for each name, not a million.
            line[name] = intern(value)
    return msgspec.convert(line, Event, builtin_types=(bytes,))


def escape(key: bytes) -> str:
    """Return a key as text, as the log has it: see `read_events`."""
    return key.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


def _unescape(text: str) -> bytes:
    data = text.encode()
    return _ESCAPE.sub(_unescaped, data) if b"\\" in data else data


def _unescaped(match: re.Match[bytes]) -> bytes:
    found = match[0]
    if found == b"\\\\":
        return b"\\"
    if len(found) < 4:
        raise msgspec.ValidationError("the key has a backslash that is neither \\\\ nor \\xNN")
    return bytes.fromhex(found[2:].decode())


def in_log_order(events: Iterable[Event]) -> list[Event]:
    """Return events in the order of their times, if all have one; else as they are."""
    ordered = list(events)
    if None not in [event.at for event in ordered]:
        ordered.sort(key=attrgetter("at"))
    return ordered
