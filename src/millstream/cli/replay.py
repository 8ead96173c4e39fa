"""`millstream replay`: runs a handler on the history of one key, in processes that have no connection to Redis."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from millstream.admin.key_history import History, HistoryPart, KeptEntries, histories_of, kept_entries, read_history
from millstream.admin.time_inputs import parse_end, parse_start
from millstream.cli.handler_names import Key
from millstream.cli.options import JsonLines, Url, Yes
from millstream.cli.replay_child import handler_of
from millstream.cli.replay_output import Comparison, ReplayOutput
from millstream.cli.replay_process import ReplayProcess
from millstream.cli.terminal import confirm
from millstream.delivery.keyed_stream import queue_of_key
from millstream.errors import ConfigError, MillstreamError
from millstream.handlers.handler import Handler
from millstream.handlers.upcasting import encode_state
from millstream.model import LAST_ID, EntryId, State
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape, unescape
from millstream.redis_client.key_names import own_pairs
from millstream.worker.handler_steps import HandlerSteps

_HEX = "hex"
_NewVersion = Annotated[
    str | None,
    typer.Option("--new", "--code", help="Another version of the app: run both, and compare.", metavar="APP"),
]


def replay(
    target: Annotated[str, typer.Argument(help="The app: module:app or path/to/file.py:app", metavar="APP")],
    handler: Annotated[str, typer.Argument(help="The handler; it must have a key.", metavar="HANDLER")],
    key: Key,
    new: _NewVersion = None,
    start: Annotated[
        str, typer.Option("--from", help="The first id, or a time, such as 2h (ago).", metavar="WHERE")
    ] = "earliest",
    until: Annotated[
        str | None, typer.Option("--until", help="The last id, or a time; default: the present end.", metavar="WHERE")
    ] = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="The state to begin with, a JSON object; default: an empty one.")
    ] = None,
    stream: Annotated[
        str | None, typer.Option("--stream", help="Only on this stream; default: all that it reads.", metavar="NAME")
    ] = None,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """Run a handler on all messages of a key that its streams still have, in order, and show what each led to.

    Only reads from Redis: the state is kept in memory, outputs, timers and dead letters are shown. But the handler itself runs:
    what it writes elsewhere, such as to a database or by mail, is written.

    With --new, exits with 1 if the two versions differ in an output, a timer, a state or a result.
    """
    span = _Span(parse_start(start) or LAST_ID, LAST_ID if until is None else parse_end(until))
    environment = dict(os.environ)  # as it is before the app is loaded, which adds its folder
    known = handler_of(target, handler)
    first_state = _state_of(state, known)
    confirm(
        f"Run {known.label} on the history of {escape(unescape(key))}? Nothing is written to Redis, but what the handler "
        "does elsewhere is done.",
        yes=yes,
    )
    output = ReplayOutput(key=unescape(key), compared=new is not None, as_json=as_json)
    with Client(url) as client, ExitStack() as processes:
        histories = histories_of(client, known, unescape(key), stream)
        if state is not None and len(histories) > 1:
            raise ConfigError(
                f"{known.label} reads {len(histories):,} streams, each with states of its own: add --stream"
            )
        versions = [
            processes.enter_context(ReplayProcess(one, handler, unescape(key), environment))
            for one in (target, *([] if new is None else [new]))
        ]
        if first_state and not all(one.facts.wants_state for one in versions):
            raise ConfigError(f"{new!r}: {handler} takes no State: leave out --state")
        reader = _Reader(client=client, handler=known, key=unescape(key), span=span, output=output)
        for history in histories:
            _replay_history(reader, versions, history, first_state)
        output.end()
    if not output.messages:
        raise MillstreamError(f"no message of {known.label} with the key {key!r} is in what its streams still have")
    if output.differing:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Span:
    """The ids from `first` to `last`."""

    first: EntryId
    last: EntryId


@dataclass(kw_only=True)
class _Reader:
    """Finds the messages of a key in its streams, and reports what the streams still have."""

    client: Client
    handler: Handler
    key: bytes
    span: _Span
    output: ReplayOutput
    steps: HandlerSteps = field(init=False)

    def __post_init__(self) -> None:
        self.steps = HandlerSteps(self.handler)

    def messages(self, history: History) -> Iterator[tuple[str, str, Sequence[bytes]]]:
        """Yield the messages of the key in a history, each with its stream and id."""
        for part in history:
            kept = kept_entries(self.client, part.stream)
            if kept is None:
                continue
            self.output.begin_stream(part.stream, kept, self.span.first)
            yield from self._messages_of(part, kept)
            after = kept_entries(self.client, part.stream)
            if after is None or after.removed > kept.removed:
                self.output.trimmed_meanwhile(part.stream)

    def _messages_of(self, part: HistoryPart, kept: KeptEntries) -> Iterator[tuple[str, str, Sequence[bytes]]]:
        queue = queue_of_key(self.key, b"")
        last = min(self.span.last, part.until, kept.last)
        for page in read_history(self.client, part.stream, max(self.span.first, kept.first), last):
            for entry_id, pairs in page:
                if self.steps.queue_of(part.stream, entry_id, pairs) == queue:
                    yield part.stream, entry_id.decode(), own_pairs(pairs)
            self.output.has_read(len(page))


def _state_of(file: Path | None, handler: Handler) -> bytes:
    """The state in a file, as it is stored in Redis; b"" without a file."""
    if file is None:
        return b""
    if not handler.wants_state:
        raise ConfigError(f"{handler.label} takes no State: leave out --state")
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ConfigError(f"{str(file)!r}: a state is a JSON object")
        return encode_state(State(_with_bytes(found)), handler.state_version)
    except OSError as error:
        raise ConfigError(f"cannot read {str(file)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{str(file)!r} is not a state in JSON: {error}") from error


def _with_bytes(value: Any) -> Any:
    """A value of JSON, with bytes where `millstream state show` has {"hex": "..."}."""
    if isinstance(value, dict):
        if value.keys() == {_HEX} and isinstance(value[_HEX], str):
            return bytes.fromhex(value[_HEX])
        return {name: _with_bytes(content) for name, content in value.items()}
    return [_with_bytes(item) for item in value] if isinstance(value, list) else value


def _replay_history(reader: _Reader, versions: Sequence[ReplayProcess], history: History, first_state: bytes) -> None:
    states = [first_state] * len(versions)
    for stream, entry_id, pairs in reader.messages(history):
        found = [one.replay(stream, entry_id, pairs, state) for one, state in zip(versions, states, strict=True)]
        states = [one.state for one in found]
        reader.output.show(Comparison(stream=stream, id=entry_id, versions=found))
