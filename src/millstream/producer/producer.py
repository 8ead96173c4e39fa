"""Producer: publishes one message or many from a program, each once, although replies may be lost on the way.

Every call returns when Redis has confirmed it, so the producer buffers nothing that could be lost.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from threading import Lock
from typing import Self, TypeVar

from millstream.errors import (
    AccessDenied,
    CommandFailed,
    ConfigError,
    NotReplicated,
    OutOfMemory,
    PartitionClosed,
    RedisError,
    StreamFull,
    Unavailable,
    WrongType,
)
from millstream.handlers.encoding import encode_output
from millstream.observability import metrics as m
from millstream.observability.metrics import NO_METRICS, Metrics, init_series
from millstream.observability.tracing import tracing
from millstream.producer.session import BATCH_ENTRIES, BATCH_SIZE, Batch, ProducerSession, PublishOptions, new_token
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client

DedupeId = str | bytes
Identified = tuple[object, DedupeId | None]
T = TypeVar("T")

_ERRORS = (Unavailable, OutOfMemory, StreamFull, NotReplicated, AccessDenied, WrongType, CommandFailed)
"""The errors that end the sending of a batch."""


class Publishing:
    """The common part of producers: a session per stream, a thread for coroutines, and metrics. Not for use by
    itself.
    """

    def __init__(
        self, redis: str | Client, capacity: int | None, dedupe_window_ms: int, patience_ms: float, metrics: Metrics
    ) -> None:
        if capacity is not None and capacity < 1:
            raise ConfigError(f"capacity={capacity}: use 1 or more")
        if dedupe_window_ms < 1:
            raise ConfigError(f"dedupe_window_ms={dedupe_window_ms}: use 1 or more")
        self._client = Client(redis) if isinstance(redis, str) else redis
        self._owns_client = isinstance(redis, str)
        self._new_session = partial(
            ProducerSession,
            self._client,
            token=new_token(),
            capacity=capacity,
            window_ms=dedupe_window_ms,
            patience_ms=patience_ms,
        )
        self._sessions: dict[str, ProducerSession] = {}
        self._patience_ms = patience_ms
        self._metrics = metrics
        init_series(metrics, m.PUBLISHED, m.PUBLISH_SECONDS)
        for error in _ERRORS:
            init_series(metrics, m.PUBLISH_ERRORS, error=error.__name__)
        self._tracing = tracing()
        # A batch larger than the limit would wait for ever.
        self._max_entries = min(BATCH_ENTRIES, capacity or BATCH_ENTRIES)
        self._lock = Lock()
        # One thread, so that messages keep the order in which the event loop published them.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="millstream-producer")

    def close(self) -> None:
        """Wait for pending `publish_async` calls, then close the connections that the producer opened itself."""
        self._thread.shutdown()
        if self._owns_client:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it, and let the event loop go on while pending `publish_async` calls end."""
        await asyncio.to_thread(self.close)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        # With the context of the caller, so that its trace goes on in the thread.
        run = copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: run(call))

    def _send(
        self, session: ProducerSession, batch: Batch, options: PublishOptions, generation: int | None = None
    ) -> bytes:
        began = time.perf_counter()
        try:
            reply = session.send(batch, options, generation=generation)
        except PartitionClosed:
            raise  # the caller publishes to another partition
        except RedisError as error:
            self._metrics.count(m.PUBLISH_ERRORS, error=type(error).__name__)
            raise
        self._metrics.count(m.PUBLISHED, batch.entries)
        self._metrics.observe(m.PUBLISH_SECONDS, time.perf_counter() - began)
        return reply

    def _session(self, stream: str) -> ProducerSession:
        with self._lock:
            if stream not in self._sessions:
                self._sessions[stream] = self._new_session(stream)
            return self._sessions[stream]


class Producer(Publishing):
    """Publishes messages to streams: in order, and each once, however often a call has to be repeated (Kafka KIP-98).

    * `redis`: the URL of Redis, or a Client, which is then shared and stays open at the end; None = the URL that the
      commands use, MILLSTREAM_URL or redis://127.0.0.1:6379/0
    * `capacity`: most entries that a stream may hold; a publish beyond that waits until there is room. None = no
      limit. It counts all entries, so processed ones must be removed (trimmed)
    * `dedupe_window_ms`: how long a `dedupe_id` is remembered, in milliseconds
    * `patience_ms`: how long a publish waits while Redis is unavailable or out of memory, or for room in a full stream,
      in milliseconds
    * `metrics`: receives the number of messages, durations and errors

    Messages are a mapping, or an instance of a dataclass, msgspec.Struct or pydantic model (`encode_output`). Messages
    from one thread to one stream keep their order. Several threads may share a producer; processes must not: create one
    after a fork. Close it, or use it as a context manager: `with`, or `async with` in coroutines, which blocks no event
    loop while pending calls end. Raises ConfigError for invalid options.
    """

    def __init__(
        self,
        redis: str | Client | None = None,
        *,
        capacity: int | None = None,
        dedupe_window_ms: int = 3_600_000,
        patience_ms: float = 30_000.0,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        super().__init__(
            redis or os.environ.get("MILLSTREAM_URL") or DEFAULT_URL, capacity, dedupe_window_ms, patience_ms, metrics
        )

    def publish(
        self,
        stream: str,
        message: object,
        *,
        dedupe_id: DedupeId | None = None,
        delay_ms: float = 0.0,
        replicas: int = 0,
        timeout_ms: int = 1_000,
    ) -> str:
        """Publish `message` and return the id of its entry, or with a delay the id under which it can be cancelled.

        * `dedupe_id`: your own id of the message, such as an order number. If any process published it to the stream
          before, nothing is published and the id returned then is returned again
        * `delay_ms`: the entry is added so many milliseconds later (`millstream.delivery.delayed_messages`)
        * `replicas`, `timeout_ms`: wait (Redis WAIT) until so many replicas have the entry, at most so many
          milliseconds

        Raises OutputError for a message that cannot be encoded; StreamFull and OutOfMemory if it was not published for
        lack of room; NotReplicated if it was published but not confirmed; and other RedisErrors. After another
        Unavailable it may or may not be published: only with a `dedupe_id` is it then safe to publish it again.
        """
        options = PublishOptions(delay_ms=delay_ms, replicas=replicas, timeout_ms=timeout_ms)
        batch = Batch()
        with self._tracing.publish_span(stream, 1):
            _add_message(batch, message, dedupe_id, self._tracing.trace_fields())
            return self._send(self._session(stream), batch, options).decode()

    def publish_many(
        self,
        stream: str,
        messages: Iterable[object],
        *,
        dedupe_ids: Sequence[DedupeId] | None = None,
        delay_ms: float = 0.0,
        replicas: int = 0,
        timeout_ms: int = 1_000,
    ) -> list[str]:
        """Publish `messages` in order, in batches; return for each the id that `publish` would return.

        There are as many `dedupe_ids` as messages. A batch is published whole or not at all, after those before it.
        Raises as `publish`; when it raises, the batches before are published, and those after are not.
        """
        options = PublishOptions(delay_ms=delay_ms, replicas=replicas, timeout_ms=timeout_ms)
        session = self._session(stream)
        identified = with_ids(messages, dedupe_ids)
        ids: list[str] = []
        with self._tracing.publish_span(stream, len(identified)):
            for batch in self._batches(identified, self._tracing.trace_fields()):
                try:
                    ids += self._send(session, batch, options).decode().split()
                except NotReplicated as error:
                    error.ids = [*ids, *error.ids]
                    raise
        return ids

    async def publish_async(
        self,
        stream: str,
        message: object,
        *,
        dedupe_id: DedupeId | None = None,
        delay_ms: float = 0.0,
        replicas: int = 0,
        timeout_ms: int = 1_000,
    ) -> str:
        """Publish as `publish` does, from a coroutine: in a thread of the producer, in the order of the calls.

        Cancelling the coroutine does not cancel a publish that is under way.
        """
        return await self._in_thread(
            lambda: self.publish(
                stream, message, dedupe_id=dedupe_id, delay_ms=delay_ms, replicas=replicas, timeout_ms=timeout_ms
            )
        )

    async def publish_many_async(
        self,
        stream: str,
        messages: Iterable[object],
        *,
        dedupe_ids: Sequence[DedupeId] | None = None,
        delay_ms: float = 0.0,
        replicas: int = 0,
        timeout_ms: int = 1_000,
    ) -> list[str]:
        """Publish as `publish_many` does, from a coroutine; see `publish_async`."""
        return await self._in_thread(
            lambda: self.publish_many(
                stream, messages, dedupe_ids=dedupe_ids, delay_ms=delay_ms, replicas=replicas, timeout_ms=timeout_ms
            )
        )

    def _batches(self, identified: Iterable[Identified], trace: Sequence[bytes]) -> Iterator[Batch]:
        batch = Batch()
        for message, own_id in identified:
            _add_message(batch, message, own_id, trace)
            if batch.entries >= self._max_entries or batch.size >= BATCH_SIZE:
                yield batch
                batch = Batch()
        if batch.entries:
            yield batch


def with_ids(messages: Iterable[object], dedupe_ids: Sequence[DedupeId] | None) -> list[Identified]:
    """Return each message with its own id. Raises ConfigError if their numbers differ."""
    messages = list(messages)
    own_ids = [None] * len(messages) if dedupe_ids is None else dedupe_ids
    if len(messages) != len(own_ids):
        raise ConfigError(f"{len(messages)} messages have {len(own_ids)} dedupe_ids: give each its own")
    return list(zip(messages, own_ids, strict=True))


def _add_message(batch: Batch, message: object, dedupe_id: DedupeId | None, trace: Sequence[bytes]) -> None:
    pairs = [*encode_output(message), *trace]
    batch.add(tuple(pairs[::2]), pairs[1::2])
    if dedupe_id is not None:
        batch.dedupe_ids.append(dedupe_id.encode() if isinstance(dedupe_id, str) else dedupe_id)
