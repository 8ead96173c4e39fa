"""Settles what was run of lines: commits it under their leases, and ends the leases that are used up."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from millstream.delivery.commit_store import Effects, chunk_by_size
from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseRelease, lease_of
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import OutOfMemory, Unavailable
from millstream.handlers.attempt import DeadLettered, Done, Outcome, Parked, RetryLater
from millstream.handlers.dead_letter import reason_of
from millstream.redis_client.client import Reply
from millstream.worker.completion_queue import Ran
from millstream.worker.settling.committer import Committer

logger = logging.getLogger(__name__)

Runs = list[tuple[Delivery, Outcome]]
"""What was run of a line, in order, and what became of it."""


@dataclass(slots=True, eq=False)
class _LeaseOutcome:
    """What is to be done about a lease: effects to commit, and another end of it than that its turn is over."""

    lease: KeyLease
    runs: Runs
    done: Sequence[Delivery] = ()
    unit: Effects | None = None
    ending: LeaseRelease | None = None

    @property
    def is_over(self) -> bool:
        """True if nothing more of the line is run under this lease."""
        return self.lease.last is self.runs[-1][0]


@dataclass(frozen=True, slots=True)
class _PipelinedReply:
    """A commit that was sent together with others': under which number, and what came back."""

    call: str
    reply: Reply
    took_s: float


class KeyCommitter(Committer):
    """A Settler for handlers with a key. What fails waits in Redis, with its line, for its next attempt.

    `on_turned` is told of a stream of which the turn of a line is over, or lost: there may be more of it.
    """

    def __init__(self, *means: Any, on_turned: Callable[[str], None] = lambda stream: None, **options: Any) -> None:
        super().__init__(*means, **options)
        self._on_turned = on_turned
        self._kept: dict[KeyLease, Runs] = {}

    def settle(self, found: Sequence[Ran]) -> None:
        """Do what the outcomes ask for."""
        self._report_times(found)
        if found:
            self._hand.took(sum(deliveries[0].took_ms for deliveries, _ in found) / len(found))
        # What waits for memory comes before what was run of the same line since.
        runs, self._kept = self._kept, {}
        for (delivery,), outcome in found:
            runs.setdefault(lease_of(delivery), []).append((delivery, outcome))
        by_stream: dict[KeyedStream, list[_LeaseOutcome]] = defaultdict(list)
        for lease, some in runs.items():
            if lease.lost or not all(delivery in self._hand for delivery, _ in some):
                self._lose(lease)
            else:
                by_stream[lease.stream].append(self._turn(lease, some))
        sent = self._commit_together(by_stream) if len(by_stream) > 1 else {}
        for stream, turns in by_stream.items():
            self._settle_of(stream, turns, sent.get(stream))
        self._report.ended(len(found))

    def _turn(self, lease: KeyLease, runs: Runs) -> _LeaseOutcome:
        turn = _LeaseOutcome(lease, runs)
        effects = [(delivery, outcome) for delivery, outcome in runs if isinstance(outcome, (Done, DeadLettered))]
        lease.ending = turn.is_over
        if effects:
            turn.done = [delivery for delivery, _ in effects]
            turn.unit = self._pipeline.commit_turn(lease, effects)
            if turn.is_over and len(effects) == len(runs):
                turn.unit.left = lease.given - len(effects)
        last, outcome = runs[-1]
        if isinstance(outcome, RetryLater):
            turn.ending = LeaseRelease(lease, "later", self._pipeline.retry(last, outcome), last.attempt)
        elif isinstance(outcome, Parked):
            turn.ending = LeaseRelease(lease, "park", f"{outcome.reason}: {outcome.error}", last.attempt)
        return turn

    def _commit_together(
        self, by_stream: Mapping[KeyedStream, Sequence[_LeaseOutcome]]
    ) -> dict[KeyedStream, _PipelinedReply]:
        """Commit what can go in one round trip. What is not answered well is committed again, stream by stream."""
        of = {stream: _with_effects(turns) for stream, turns in by_stream.items()}
        calls = {stream: stream.new_call() for stream in _first_trip(of)}
        commands = [stream.to_commit(_units(of[stream]), call) for stream, call in calls.items()]
        began_ms = self._clock.monotonic_ms()
        replies: Sequence[Reply]
        try:
            replies = self._client.pipeline(commands)
        except Unavailable as error:
            replies = [error] * len(commands)
        took_s = (self._clock.monotonic_ms() - began_ms) / 1000
        return {
            stream: _PipelinedReply(call, reply, took_s)
            for (stream, call), reply in zip(calls.items(), replies, strict=True)
        }

    def _settle_of(self, stream: KeyedStream, turns: Sequence[_LeaseOutcome], sent: _PipelinedReply | None) -> None:
        kept = [turn for some in _portions(_with_effects(turns)) for turn in self._commit_or_keep(stream, some, sent)]
        turns = [turn for turn in turns if turn not in kept and not turn.lease.lost]
        endings = [turn.ending for turn in turns if turn.ending is not None]
        if endings:
            self._report.retried_some(sum(ending.how == "later" for ending in endings))
            self._report.parked_some(sum(ending.how == "park" for ending in endings))
            for lease in self._patiently(lambda: stream.release(endings)):
                self._lose(lease)
        over = [turn for turn in turns if turn.is_over]
        for turn in over:
            self._hand.end_lease(turn.lease)
            turn.lease.forget()
        if over:
            self._on_turned(stream.stream)

    def _commit_or_keep(
        self, stream: KeyedStream, turns: Sequence[_LeaseOutcome], sent: _PipelinedReply | None
    ) -> list[_LeaseOutcome]:
        """Commit what has effects; return what Redis has no memory for, which is kept, with its lease."""
        try:
            self._commit_turns(stream, turns, sent)
        except OutOfMemory as error:
            # What only acknowledges frees memory in the end.
            plain = [turn for turn in turns if turn.unit and turn.unit.is_acknowledgement]
            self._commit_turns(stream, plain, None, allow_oom=True)
            kept = [turn for turn in turns if turn not in plain]
            self._kept |= {turn.lease: turn.runs for turn in kept}
            for turn in kept:
                turn.lease.ending = False  # it has to be extended meanwhile
            self._say_that_memory_is_short(sum(len(turn.runs) for turn in kept), stream, error)
            return kept
        return []

    def _commit_turns(
        self,
        stream: KeyedStream,
        turns: Sequence[_LeaseOutcome],
        sent: _PipelinedReply | None,
        *,
        allow_oom: bool = False,
    ) -> None:
        if not turns:
            return
        of = {id(turn.unit): turn for turn in turns}
        units = _units(turns)
        began_ms = self._clock.monotonic_ms()
        if sent is None or isinstance(sent.reply, Exception):
            call = sent.call if sent else stream.new_call()
            refused = self._patiently(lambda: stream.commit(units, allow_oom=allow_oom, call=call))
        else:
            refused = stream.committed(units, sent.reply)
        took_s = (self._clock.monotonic_ms() - began_ms) / 1000 + (sent.took_s if sent else 0.0)
        for unit in refused:
            self._lose(of.pop(id(unit)).lease)
        done: list[Delivery] = []
        dead: list[str] = []
        for turn in of.values():
            assert turn.unit is not None
            turn.lease.given -= len(turn.done)
            if turn.unit.state is not None:
                turn.lease.committed_state = turn.unit.state
            done += turn.done
            dead += map(reason_of, turn.unit.dead)
        self._hand.drop(done)
        self._report.committed_some(done, dead, took_s)

    def _lose(self, lease: KeyLease) -> None:
        """Another worker has the line, or a person has changed it: nothing of it is this worker's any more."""
        lease.lost = True
        self._on_turned(lease.stream.stream)
        lost = self._hand.end_lease(lease)
        if lost:
            self._report.refused_some(len(lost))
            logger.warning(
                "%d messages of %s were not committed: another worker has taken their line over (first: %s)",
                len(lost), lease.stream.stream, lost[0].id.decode(),
            )  # fmt: skip

    @property
    def _waits_for_memory(self) -> bool:
        return bool(self._kept)

    def _try_memory_again(self) -> None:
        self.settle(())


def _with_effects(turns: Sequence[_LeaseOutcome]) -> list[_LeaseOutcome]:
    return [turn for turn in turns if turn.unit is not None]


def _portions(turns: Sequence[_LeaseOutcome]) -> Iterator[Sequence[_LeaseOutcome]]:
    return chunk_by_size(turns, attrgetter("unit"))


def _first_trip(of: Mapping[KeyedStream, Sequence[_LeaseOutcome]]) -> Iterator[KeyedStream]:
    """The first streams whose turns make one portion, all together."""
    room = len(next(_portions([turn for turns in of.values() for turn in turns]), ()))
    for stream, turns in of.items():
        room -= len(turns)
        if turns and room >= 0:
            yield stream


def _units(turns: Sequence[_LeaseOutcome]) -> list[Effects]:
    return [turn.unit for turn in turns if turn.unit is not None]
