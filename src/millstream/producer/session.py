"""ProducerSession: sends one producer's batches to one stream, in order and each once, although replies may be lost.

A batch is one atomic step at the server, which stores the number of the producer's last batch and its reply. So a batch
whose reply was lost is simply sent again (the idempotent producer of Apache Kafka, KIP-98).
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from math import ceil

import msgspec

from millstream.errors import (
    CommandFailed,
    ConfigError,
    NotReplicated,
    OutOfMemory,
    OutputError,
    PartitionClosed,
    StreamFull,
    Unavailable,
)
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import StreamKeys, to_wire
from millstream.redis_client.resp import Arg
from millstream.redis_client.scripts import Script

MAX_FIELDS = 3_900
"""Most fields of an entry: Lua's `unpack` passes no more inside a script."""

BATCH_ENTRIES = 500
BATCH_SIZE = 1_000_000
"""A batch is sent when it has BATCH_ENTRIES entries or BATCH_SIZE bytes."""

PUBLISH = Script("producer/publish")

_MAX_DELAY_MS = 10 * 366 * 86_400_000


def new_token() -> str:
    """Return a name for a producer that no other one has."""
    return secrets.token_hex(8)


class _Run(msgspec.Struct):
    """Entries with the same field names: the names cross the wire once."""

    names: Sequence[str | bytes]
    name_size: int
    entries: int = 0
    values: list[str | bytes] = msgspec.field(default_factory=list)


class Batch(msgspec.Struct):
    """Entries that are published in one step; `dedupe_ids` are the caller's own ids, of all of them or of none."""

    runs: list[_Run] = msgspec.field(default_factory=list)
    dedupe_ids: list[bytes] = msgspec.field(default_factory=list)
    entries: int = 0
    size: int = 0

    def add(self, names: Sequence[str | bytes], values: Sequence[str | bytes]) -> None:
        """Add one entry, with as many names as values. Raises OutputError if it has no fields or too many."""
        if not 0 < len(names) <= MAX_FIELDS:
            raise OutputError(f"an entry has 1 to {MAX_FIELDS:,} fields, this one {len(names):,}")
        if not self.runs or self.runs[-1].names != names:
            self.runs.append(_Run(names, sum(map(len, names))))
        run = self.runs[-1]
        run.entries += 1
        run.values += values
        self.entries += 1
        self.size += run.name_size + sum(map(len, values))

    def args(self) -> list[Arg]:
        """Return its part of the publish script's arguments."""
        args: list[Arg] = []
        for run in self.runs:
            args += (len(run.names), run.entries, *run.names)
            args += run.values
        return args


class PublishOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch is published.

    * `delay_ms`: added so many milliseconds later, by the server's clock; 0 = at once
    * `replicas`, `timeout_ms`: so many replicas must confirm it within so many milliseconds; 0 = none

    Raises ConfigError for invalid options.
    """

    delay_ms: float = 0.0
    replicas: int = 0
    timeout_ms: int = 1_000

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms <= _MAX_DELAY_MS:
            raise ConfigError(f"a delay of {self.delay_ms} ms: use 0 (at once) up to ten years")
        if self.replicas < 0:
            raise ConfigError(f"{self.replicas} replicas cannot confirm an entry: use 0 (no check) or more")


AT_ONCE = PublishOptions()


class ProducerSession:
    """Sends the batches of producer `token` to `stream`: in order, and none of them twice.

    * `maxlen`: trims the stream to about so many entries; None = never
    * `capacity`: most entries that the stream may hold, delayed ones included if the batch is delayed; None = no
      limit
    * `window_ms`: how long callers' own ids are remembered, in milliseconds; the number of the last batch for as long,
      and at least for a day
    * `patience_ms`: how long a batch waits while Redis is unavailable or out of memory, or for room in a full stream,
      before it raises
    * `sequence`: the number of the producer's batch before

    Several threads may share it. Raises ConfigError for a stream name that cannot be used.
    """

    def __init__(
        self,
        client: Client,
        stream: str,
        *,
        token: str,
        maxlen: int | None = None,
        capacity: int | None = None,
        window_ms: int = 0,
        patience_ms: float,
        sequence: int = 0,
    ) -> None:
        if not stream:
            raise ConfigError('the stream name is empty: give the name of a stream, like "orders"')
        names = StreamKeys(stream)
        self._client = client
        self._stream = stream
        self._names = names
        self._keys = tuple(map(to_wire, (stream, names.producer(token), names.due, names.delayed)))
        self._maxlen = maxlen
        self._capacity = capacity
        self._window_ms = window_ms
        self._patience_ms = patience_ms
        self._sequence = sequence
        self._send_lock = threading.Lock()

    def send(self, batch: Batch, terms: PublishOptions = AT_ONCE, *, generation: int | None = None) -> bytes:
        """Publish `batch` and return the ids of its entries, or of its delayed messages, separated by spaces.

        `generation`: for partitions, the newest that the producer knows. Raises ConfigError for a partition without it,
        PartitionClosed if there is a newer one, and other RedisErrors; after Unavailable, other than OutOfMemory and
        StreamFull, it may have been published.
        """
        keys = (*self._keys, *(to_wire(self._names.dedupe(own)) for own in batch.dedupe_ids))
        options: list[Arg] = [
            self._maxlen or "",
            self._capacity or "",
            ceil(terms.delay_ms) or "",
            self._window_ms,
            generation or "",
        ]
        with self._send_lock:
            self._sequence += 1
            args: list[Arg] = [self._sequence, *options, *batch.args()]
            try:
                reply, confirmed = self._client.retry_while_unavailable(
                    _Attempts(lambda: self._attempt(keys, args, terms)),
                    what=f"publishing to {self._stream}",
                    limit_ms=self._patience_ms,
                )
            except UnicodeEncodeError as error:
                raise OutputError(f"{error.object[:40]!r} is not valid Unicode: publish it as bytes") from error
        if confirmed < terms.replicas:
            raise NotReplicated(
                f"{batch.entries:,} entries are published to {self._stream}, but only {confirmed} of {terms.replicas} "
                f"replicas confirmed them within {terms.timeout_ms} ms: a failover now may lose them",
                reply.decode().split(),
            )
        return reply

    def _attempt(self, keys: Sequence[Arg], args: Sequence[Arg], terms: PublishOptions) -> tuple[bytes, int]:
        try:
            if not terms.replicas:
                return self._client.script(PUBLISH, keys, args), 0
            return self._client.replicated_script(
                PUBLISH, keys, args, replicas=terms.replicas, timeout_ms=terms.timeout_ms
            )
        except CommandFailed as error:
            if error.code == "CLOSED":
                raise PartitionClosed(
                    f"{self._stream} is closed to this producer: the partitions have grown"
                ) from error
            if error.code == "PARTITIONED":
                raise ConfigError(
                    f"{self._stream} is a partition: publish with a PartitionedProducer, which finds each key's partition"
                ) from error
            if error.code == "FULL":
                raise StreamFull(
                    f"{self._stream} has no room, it holds {error.detail} of at most {self._capacity} entries: publish "
                    "again when some are processed and removed"
                ) from error
            raise


class _Attempts:
    """Repeated attempts to publish. After a lost reply, the error of a later attempt says that it may be published."""

    def __init__(self, attempt: Callable[[], tuple[bytes, int]]) -> None:
        self._attempt = attempt
        self._lost_reply = False

    def __call__(self) -> tuple[bytes, int]:
        try:
            return self._attempt()
        except OutOfMemory as error:
            if self._lost_reply:
                raise Unavailable(
                    f"{error}; the reply to an earlier attempt was lost, so it may be published"
                ) from error
            raise
        except StreamFull:
            raise  # the script has checked for an earlier attempt first
        except Unavailable:
            self._lost_reply = True
            raise
