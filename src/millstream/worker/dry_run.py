"""Dry run: runs a handler on real entries and commits nothing, to show the outcome that each entry would have."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from millstream.admin.redis_metrics import streams_of
from millstream.delivery.state_expiry import live_states
from millstream.errors import DecodeError
from millstream.groups import Group
from millstream.handlers.attempt import BatchOutcome, DeadLettered, Done, Outcome, RetryLater
from millstream.handlers.breaker_window import cause_of
from millstream.handlers.handler import Handler
from millstream.model import ZERO_ID, EntryId, Message, Retry
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD, HandlerKeys, own_pairs
from millstream.redis_client.resp import Arg
from millstream.worker.handler_steps import HandlerSteps

_PAGE = 100


@dataclass(kw_only=True)
class WouldFail:
    """Messages that would become dead letters for one cause; `stream`, `id`, `error`, `traceback`: of the first."""

    cause: str
    count: int
    stream: str
    id: str
    error: str
    traceback: str


@dataclass(kw_only=True)
class DryRun:
    """The outcomes of a sample of entries: processed (`ok`), rejected by the handler, or dead for other causes.

    `outputs`: how many entries the handler would write to its output stream. `of`: "uncommitted" if the sample has the
    first entries that are not committed; "newest" if it has the newest, by request or as all are committed.
    """

    handler: str
    of: Literal["uncommitted", "newest"] = "uncommitted"
    ok: int = 0
    rejected: int = 0
    outputs: int = 0
    failures: list[WouldFail] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """How many would become dead letters, not counting rejected ones."""
        return sum(one.count for one in self.failures)


def dry_run(client: Client, handler: Handler, *, sample: int, newest: bool = False) -> DryRun:
    """Run `handler` on up to `sample` entries, spread over its streams; only reads from Redis. Raises RedisError.

    Each entry gets one attempt, as if it were the last. States are loaded, and passed from one message to the next in
    memory. Effects that the handler has by itself, as in a database, take place.
    """
    handler = replace(handler, retry=Retry(attempts=1))
    result = DryRun(handler=handler.label, of="newest" if newest else "uncommitted")
    streams = sorted(streams_of(client, handler))
    each = -(-sample // max(1, len(streams)))
    found: list[tuple[str, bytes, Sequence[bytes]]] = []
    if not newest:
        found = list(islice((one for name in streams for one in _uncommitted(client, handler, name, each)), sample))
    if not found:
        result.of = "newest"
        found = list(islice((one for name in streams for one in _newest(client, name, each)), sample))
    _Rehearsal(client, handler, result).run(found)
    return result


def _uncommitted(client: Client, handler: Handler, stream: str, most: int) -> Iterator[tuple[str, bytes, list[bytes]]]:
    """Yield the first entries of a stream from the lowest that is not committed on. Some of them may be."""
    keys = HandlerKeys(handler.app, handler.name, stream)
    group = Group(client, stream, keys.group)
    committed = client.execute("HGET", keys.meta, "committed_id")
    after = EntryId.parse(committed) if committed else ZERO_ID
    lowest = None
    if (info := group.info()) is not None:
        after = max(after, EntryId.parse(info.last_delivered))
        lowest = group.pending.summary().lowest
    yield from _entries(client, stream, f"({after}" if lowest is None else lowest, most)


def _entries(client: Client, stream: str, start: Arg, most: int) -> Iterator[tuple[str, bytes, list[bytes]]]:
    while most > 0:
        page = client.execute("XRANGE", stream, start, "+", "COUNT", min(most, _PAGE))
        yield from ((stream, entry_id, pairs) for entry_id, pairs in page)
        if len(page) < min(most, _PAGE):
            return
        most, start = most - len(page), b"(" + page[-1][0]


def _newest(client: Client, stream: str, most: int) -> list[tuple[str, bytes, list[bytes]]]:
    found = client.execute("XREVRANGE", stream, "+", "-", "COUNT", most)
    return [(stream, entry_id, pairs) for entry_id, pairs in reversed(found)]


class _Rehearsal:
    """Runs entries one after another, or in lists, and adds their outcomes to `result`."""

    def __init__(self, client: Client, handler: Handler, result: DryRun) -> None:
        self._client = client
        self._handler = handler
        self._steps = HandlerSteps(handler)
        self._result = result
        self._states: dict[tuple[str, bytes], bytes] = {}

    def run(self, entries: Sequence[tuple[str, bytes, Sequence[bytes]]]) -> None:
        """Run all entries."""
        messages = [one for entry in entries if (one := self._message(*entry)) is not None]
        in_lists = self._handler.in_batches and self._handler.key is None
        asyncio.run(self._run_lists(messages) if in_lists else self._run_each(messages))

    def _message(self, stream: str, entry_id: bytes, pairs: Sequence[bytes]) -> Message | None:
        """The message of an entry; None if it is for another handler alone."""
        if pairs[0] == REDRIVE_FIELD and pairs[1] != self._handler.label.encode():
            return None
        message = Message(stream, entry_id.decode(), own_pairs(pairs))
        with suppress(DecodeError):  # running it finds the same
            message.key = self._handler.key_of(message)
        return message

    async def _run_each(self, messages: Sequence[Message]) -> None:
        for message in messages:
            state = self._state_of(message)
            # The handler may change its message.
            outcome = await self._attempt_alone(replace(message, pairs=list(message.pairs)), state)
            if isinstance(outcome, Done) and message.key is not None and self._handler.wants_state:
                self._states[message.stream, message.key] = outcome.state
            self._add(message, outcome)

    async def _attempt_alone(self, message: Message, state: bytes) -> Outcome:
        steps, is_async = self._steps, self._handler.is_async
        if self._handler.in_batches:
            ended = await steps.run_list_async([message], state) if is_async else steps.run_list([message], state)
            return ended[1]
        return await steps.run_async(message, state) if is_async else steps.run(message, state)

    async def _run_lists(self, messages: Sequence[Message]) -> None:
        for stream in dict.fromkeys(one.stream for one in messages):
            left = iter([one for one in messages if one.stream == stream])
            while some := list(islice(left, self._handler.batch_size)):
                await self._run_list(some)

    async def _run_list(self, messages: Sequence[Message]) -> None:
        """Run a list; if it fails, run each of its messages alone, as the engines do."""
        dead, outcome = await self._attempt(messages)
        run = [message for message, one in zip(messages, dead, strict=True) if one is None]
        for message, one in zip(messages, dead, strict=True):
            if one is not None:
                self._add(message, one)
        if isinstance(outcome, Done):
            self._result.ok += len(run)
            self._result.outputs += len(outcome.outputs)
        elif len(run) == 1:
            self._add(run[0], outcome)
        else:
            for message in run:
                (refused,), alone = await self._attempt([message])
                self._add(message, refused or alone)

    async def _attempt(self, messages: Sequence[Message]) -> BatchOutcome:
        some = [replace(one, pairs=list(one.pairs)) for one in messages]
        return await self._steps.run_batch_async(some) if self._handler.is_async else self._steps.run_batch(some)

    def _state_of(self, message: Message) -> bytes:
        if message.key is None or not self._handler.wants_state:
            return b""
        place = message.stream, message.key
        if place not in self._states:
            keys = HandlerKeys(self._handler.app, self._handler.name, message.stream)
            stored = self._client.execute("HGET", keys.state, message.key)
            (state,) = live_states(self._client, keys.state, [stored])
            self._states[place] = state or b""
        return self._states[place]

    def _add(self, message: Message, outcome: Outcome) -> None:
        result = self._result
        if isinstance(outcome, Done):
            result.ok += 1
            result.outputs += len(outcome.outputs)
            return
        if isinstance(outcome, RetryLater):  # its state is newer: no other outcome of a last attempt is retried
            outcome = DeadLettered("failed", outcome.error)
        assert isinstance(outcome, DeadLettered)  # its one attempt is the last, and nothing is parked
        if outcome.reason == "rejected":
            result.rejected += 1
            return
        cause = cause_of(outcome) or outcome.reason
        for known in result.failures:
            if known.cause == cause:
                known.count += 1
                return
        first = WouldFail(
            cause=cause, count=1, stream=message.stream, id=message.id, error=outcome.error, traceback=outcome.traceback
        )
        result.failures.append(first)
