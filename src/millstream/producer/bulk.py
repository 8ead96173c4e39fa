"""Publisher: adds entries in bulk, and prepares a batch while the one before it is under way."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, OutputError
from millstream.handlers.encoding import encode_output
from millstream.producer.session import BATCH_ENTRIES, BATCH_SIZE, Batch, ProducerSession, PublishOptions, new_token
from millstream.redis_client.client import Client

Value = str | bytes | int | float | None

_PLAIN = frozenset((str, bytes))


class Publisher:
    """Adds entries to `stream`, in batches that are never written twice. Use it as a context manager.

    * `maxlen`: trims the stream to about so many entries; None = never
    * `delay_ms`: entries reach the stream so many milliseconds later (`millstream.delivery.delayed_messages`); 0 = at
      once
    * `rate`: most entries a second; None = no limit
    * `patience_ms`: how long a batch waits while Redis is unavailable or out of memory, in milliseconds; then it raises

    `entries` counts the entries that Redis has confirmed; `first_id` and `last_id` are the ids of the first and the last of
    them, "" without any, and those of delayed messages with a delay. Leaving the context sends the buffered ones, unless an
    exception is under way. Not thread-safe. After a RedisError it must not be used any more: whether the last batch was
    written may be unknown. Raises ConfigError for invalid options.
    """

    def __init__(
        self,
        client: Client,
        stream: str,
        *,
        maxlen: int | None = None,
        delay_ms: float = 0.0,
        rate: float | None = None,
        patience_ms: float = 30_000.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if maxlen and delay_ms:
            raise ConfigError("delayed entries do not trim the stream: leave out maxlen, or the delay")
        self.entries = 0
        self.first_id = self.last_id = ""
        self._session = ProducerSession(client, stream, token=new_token(), maxlen=maxlen, patience_ms=patience_ms)
        self._options = PublishOptions(delay_ms=delay_ms)
        self._rate = rate
        self._clock = clock
        # At a low rate, entries go out evenly rather than in bursts.
        self._max_entries = BATCH_ENTRIES if rate is None else max(1, min(BATCH_ENTRIES, int(rate / 10)))
        self._next_send_ms = clock.monotonic_ms()
        self._batch = Batch()
        self._sender = _Sender(self._send)

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self._sender.close()

    def send(self, rows: Iterable[Mapping[str, Value]]) -> int:
        """Publish `rows`, each a mapping of names to values, and return how many they were.

        None is left out; numbers are written as text. Returns when Redis has confirmed all of them. Raises OutputError
        for a row that cannot be an entry (those before it are published) and RedisError.
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
        """Buffer one entry, with as many names as values; it is sent with its batch.

        Raises OutputError for an entry without fields or with too many, and RedisError for an earlier batch.
        """
        self._batch.add(names, values)
        if self._batch.entries >= self._max_entries or self._batch.size >= BATCH_SIZE:
            self._submit()

    def flush(self) -> None:
        """Send the buffered entries and wait until Redis has confirmed them. Raises RedisError."""
        if self._batch.entries:
            self._submit()
        self._sender.wait()

    def _submit(self) -> None:
        if self._rate is not None:
            now_ms = self._clock.monotonic_ms()
            if now_ms < self._next_send_ms:
                self._clock.sleep_ms(self._next_send_ms - now_ms)
            self._next_send_ms = max(now_ms, self._next_send_ms) + self._batch.entries / self._rate * 1000
        batch, self._batch = self._batch, Batch()
        self._sender.submit(batch)

    def _send(self, batch: Batch) -> None:
        ids = self._session.send(batch, self._options)
        self.first_id = self.first_id or ids.partition(b" ")[0].decode()
        self.last_id = ids.rpartition(b" ")[2].decode()
        self.entries += batch.entries


class _Sender:
    """Sends batches, one after the other, from a thread of its own, while the next ones are prepared.

    One batch is under way and one waits, so that the server does not idle. After a failure nothing more is sent. The
    thread is a daemon: while it waits for an unavailable Redis, the program can still exit.
    """

    def __init__(self, send: Callable[[Batch], None]) -> None:
        self._send = send
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Exception | None] = SimpleQueue()
        self._submitted = 0
        threading.Thread(target=self._run, name="millstream-publisher", daemon=True).start()

    def submit(self, batch: Batch) -> None:
        """Send `batch` from the thread. Raises the error of an earlier one."""
        self.wait(max_left=1)
        self._submitted += 1
        self._batches.put(batch)

    def wait(self, *, max_left: int = 0) -> None:
        """Wait until at most `max_left` batches are unconfirmed. Raises the error of one."""
        while self._submitted > max_left:
            failure = self._outcomes.get()
            self._submitted -= 1
            if failure is not None:
                raise failure

    def close(self) -> None:
        """End the thread once nothing is under way."""
        self._batches.put(None)

    def _run(self) -> None:
        failure: Exception | None = None
        while (batch := self._batches.get()) is not None:
            if failure is None:
                try:
                    self._send(batch)
                except Exception as error:  # noqa: BLE001 - raised in the caller, which waits for the batch
                    failure = error
            self._outcomes.put(failure)


def _plain(row: Mapping[str, Value]) -> tuple[Sequence[str | bytes], Sequence[str | bytes]]:
    """Return names and values of a row, without None, as text and bytes."""
    values = list(row.values())
    if _PLAIN.issuperset(map(type, values)):
        return tuple(row), values  # type: ignore[return-value]
    items = encode_output(row)
    return items[::2], items[1::2]
