"""Publishing entries: fast, in order, and once each, although replies may be lost on the way.

A batch is one atomic step at the server, which remembers the number of the producer's last batch. So a batch
whose reply was lost is simply sent again (the idempotent producer of Apache Kafka, KIP-98).
"""

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from millstream.client import Arg, Client, Script
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.decoding import encode_output
from millstream.errors import OutputError
from millstream.naming import PREFIX, hash_tag

MAX_FIELDS = 3_900
"""Most fields of an entry: more cannot be passed on inside a script (Lua's `unpack`)."""

PUBLISH = Script("publish")

Value = str | bytes | int | float | None

_BATCH_ENTRIES = 500
_BATCH_SIZE = 1_000_000
_PLAIN = frozenset((str, bytes))


@dataclass(slots=True)
class _Run:
    """Entries with the same field names: the names cross the wire once."""

    names: Sequence[str | bytes]
    name_size: int
    entries: int = 0
    values: list[str | bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Batch:
    runs: list[_Run] = field(default_factory=list)
    entries: int = 0
    size: int = 0


class Publisher:
    """Adds entries to `stream`, in batches that are never written twice. Use it as a context manager.

    * `maxlen`: trims the stream to about so many entries; None = never
    * `rate`: most entries a second; None = as many as go
    * `patience_ms`: how long a batch waits for a Redis that is away or full before it raises

    `entries` counts what Redis has confirmed. Not thread-safe. After a RedisError it must not be used any more:
    whether the last batch was written may be unknown.
    """

    def __init__(
        self,
        client: Client,
        stream: str,
        *,
        maxlen: int | None = None,
        rate: float | None = None,
        patience_ms: float = 30_000.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.entries = 0
        self._client = client
        self._stream = stream
        self._producer = f"{PREFIX}:{{{hash_tag(stream)}}}:{stream}:producer:{secrets.token_hex(8)}"
        self._maxlen: Arg = maxlen or ""
        self._rate = rate
        self._patience_ms = patience_ms
        self._clock = clock
        # At a low rate, entries go out evenly rather than in bursts.
        self._most_entries = _BATCH_ENTRIES if rate is None else max(1, min(_BATCH_ENTRIES, int(rate / 10)))
        self._free_at_ms = clock.monotonic_ms()
        self._sequence = 0
        self._batch = _Batch()
        self._sender = _Sender(self._send)

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()

    def send(self, rows: Iterable[Mapping[str, Value]]) -> int:
        """Publish `rows`, each a mapping of names to values, and return how many they were.

        None is left out; numbers are written as text. Returns when Redis has confirmed all of them. Raises
        OutputError for a row that cannot be an entry (those before it are published) and RedisError.
        """
        before = self.entries
        try:
            for row in rows:
                self.add(*_plain(row))
        except OutputError:
            self.flush()
            raise
        self.flush()
        return self.entries - before

    def add(self, names: Sequence[str | bytes], values: Sequence[str | bytes]) -> None:
        """Take one entry, with as many names as values; it is sent with its batch.

        Raises OutputError for one that has no fields or too many, and RedisError for an earlier batch.
        """
        if not 0 < len(names) <= MAX_FIELDS:
            raise OutputError(f"an entry has 1 to {MAX_FIELDS:,} fields, this one {len(names):,}")
        batch = self._batch
        if not batch.runs or batch.runs[-1].names != names:
            batch.runs.append(_Run(names, sum(map(len, names))))
        run = batch.runs[-1]
        run.entries += 1
        run.values += values
        batch.entries += 1
        batch.size += run.name_size + sum(map(len, values))
        if batch.entries >= self._most_entries or batch.size >= _BATCH_SIZE:
            self._pass_on()

    def flush(self) -> None:
        """Send what was taken and wait until Redis has confirmed it. Raises RedisError."""
        if self._batch.entries:
            self._pass_on()
        self._sender.wait()

    def _pass_on(self) -> None:
        if self._rate is not None:
            now_ms = self._clock.monotonic_ms()
            if now_ms < self._free_at_ms:
                self._clock.sleep_ms(self._free_at_ms - now_ms)
            self._free_at_ms = max(now_ms, self._free_at_ms) + self._batch.entries / self._rate * 1000
        batch, self._batch = self._batch, _Batch()
        self._sender.submit(batch)

    def _send(self, batch: _Batch) -> None:
        self._sequence += 1
        args: list[Arg] = [self._sequence, self._maxlen]
        for run in batch.runs:
            args += (len(run.names), run.entries, *run.names)
            args += run.values
        try:
            self._client.patiently(
                lambda: self._client.script(PUBLISH, (self._stream, self._producer), args),
                what=f"publishing to {self._stream}",
                limit_ms=self._patience_ms,
            )
        except UnicodeEncodeError as error:
            raise OutputError(f"{error.object[:40]!r} is not valid Unicode: publish it as bytes") from error
        self.entries += batch.entries


class _Sender:
    """Sends batches, one after the other, from a thread of its own, while the next ones are prepared.

    One is under way and one waits, so that the server does not. After a failure nothing more is sent. The thread is
    a daemon: while it waits for a Redis that is away, the program can still be ended.
    """

    def __init__(self, send: Callable[[_Batch], None]) -> None:
        self._send = send
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Exception | None] = SimpleQueue()
        self._submitted = 0
        threading.Thread(target=self._serve, name="millstream-publisher", daemon=True).start()

    def submit(self, batch: _Batch) -> None:
        """Have `batch` sent. Raises what went wrong with an earlier one."""
        self.wait(most_left=1)
        self._submitted += 1
        self._batches.put(batch)

    def wait(self, *, most_left: int = 0) -> None:
        """Wait until no more batches than that are to be confirmed. Raises what went wrong."""
        while self._submitted > most_left:
            failure = self._outcomes.get()
            self._submitted -= 1
            if failure is not None:
                raise failure

    def close(self) -> None:
        """End the thread once nothing is under way."""
        self._batches.put(None)

    def _serve(self) -> None:
        failure: Exception | None = None
        while (batch := self._batches.get()) is not None:
            if failure is None:
                try:
                    self._send(batch)
                except Exception as error:  # noqa: BLE001 - handed to the caller, who waits for one or the other
                    failure = error
            self._outcomes.put(failure)


def _plain(row: Mapping[str, Value]) -> tuple[Sequence[str | bytes], Sequence[str | bytes]]:
    """Names and values of a row, without None, as text and bytes."""
    values = list(row.values())
    if _PLAIN.issuperset(map(type, values)):
        return tuple(row), values  # type: ignore[return-value]
    items = encode_output(row)
    return items[::2], items[1::2]
