"""Maintenance: renews entries in flight, follows the streams and ends runs that hang, again and again."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from millstream.delivery.long_runs import report_long_runs
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import HandlerStuck, OutOfMemory, RedisError, Unavailable
from millstream.worker.changed_streams import FEW_STREAMS, ChangedStreams
from millstream.worker.context import WorkerContext
from millstream.worker.policy import TIME_LIMIT_GRACE_MS
from millstream.worker.settling.hang_detector import HangDetector
from millstream.worker.settling.repeated_warnings import RepeatedWarnings
from millstream.worker.settling.run_time_report import RunTimeReport
from millstream.worker.settling.stream_calls import Query, Step, ask_all, query_by
from millstream.worker.stream_exclusion import exclude_on_error

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=ReliableStream)
S_contra = TypeVar("S_contra", bound=ReliableStream, contravariant=True)

_REFRESH_MS_EACH = 2.0
_RENEWALS_PER_CLAIM = 3
_SOON_S = 0.02


class Renewer(Protocol[S_contra]):
    """The steps of maintenance that differ between claims and key leases. Each raises RedisError."""

    def recover(self, stream: S_contra) -> None:
        """Recover entries or leases of this worker that are not in flight: of its last process, or of a lost reply.

        Call it only in the thread that reads the stream, or before there is one: entries that this thread has just read
        are not in flight yet either.
        """

    def renew(self, stream: S_contra) -> None:
        """Renew the entries in flight; drop those that other workers have by now."""

    def further_steps(self, streams: Sequence[S_contra], *, renews: bool) -> Iterator[Step]:
        """Yield what else is due on `streams`, as steps on single ones whose calls share round trips.

        `renews`: all entries are renewed this time.
        """

    def claim_idle(self) -> bool:
        """Claim idle entries of other workers, as far as there is room; return True if there may be more."""

    def release_surplus(self) -> None:
        """Release entries that have not started and that other workers could start earlier."""

    def give_up(self, delivery: Delivery) -> None:
        """Record the failed attempt of a run that hangs and cannot be ended; then remove it from flight.

        If it raises Unavailable, the run is still in flight: call it again.
        """


class Maintenance(Generic[S]):
    """The maintenance loop of a worker. Used by one thread, except `recover`.

    `streams`: the streams that this worker has joined; other threads add to it.
    """

    def __init__(self, context: WorkerContext, streams: Mapping[str, S], renewer: Renewer[S]) -> None:
        self._context = context
        self._streams = streams
        self._renewer = renewer
        self._in_flight = context.in_flight
        self._loop_metrics = context.loop_metrics
        self._clock = context.clock
        self._policy = context.policy
        self._hang_detector = HangDetector(context.handler, context.consumer, context.traceback_of_run)
        self._warnings = RepeatedWarnings(logger, context)
        self._run_times = RunTimeReport(context)
        self._renew_due_ms = 0.0
        self._committed_at_trim = -1
        self._changed = ChangedStreams(self._context.client, self._clock, lambda name: (context.keys_of(name).meta,))
        self._unrefreshed: set[str] = set()
        self.reread_pending = threading.Event()
        """Set when the pending entries of this worker have to be read again: a reply that may have held entries was
        lost, or a stream is no longer paused."""

    def run(self, stopping: threading.Event) -> None:
        """Do maintenance until `stopping`. Raises HandlerStuck, StaleOwner, and RedisError except Unavailable."""
        with contextlib.closing(self._changed):
            while not stopping.wait(self._interval_ms / 1000):
                try:
                    self.run_once()
                    self._claim_until(self._clock.monotonic_ms() + self._interval_ms, stopping)
                except Unavailable as error:
                    self.reread_pending.set()
                    logger.debug("maintenance failed, Redis is unavailable: %s; retrying", error)

    def _claim_until(self, due_ms: float, stopping: threading.Event) -> None:
        while self._renewer.claim_idle() and self._clock.monotonic_ms() < due_ms and not stopping.wait(_SOON_S):
            pass

    def run_until_ended(self, over: threading.Event) -> None:
        """Renew what still runs until `over`. Raises StaleOwner, and RedisError except Unavailable."""
        while not over.wait(self._interval_ms / 1000):
            if self._clock.monotonic_ms() >= self._renew_due_ms:
                self._renew_due_ms = self._clock.monotonic_ms() + self._renew_ms
                try:
                    for stream in list(self._streams.values()):
                        with exclude_on_error(stream):
                            self._renewer.renew(stream)
                except Unavailable as error:
                    logger.debug("cannot renew running messages, Redis is unavailable: %s; retrying", error)
        self._run_times.end()

    def run_once(self) -> None:
        """Renew, record progress, check time limits, and report figures, once."""
        self._renewer.release_surplus()
        unavailable = self._maintain_all()  # perhaps of one node only: the time limits hold all the same
        self._loop_metrics.set_runs(self._begun_runs, self._clock.monotonic_ms())
        self._check_time_limits()
        self._report()
        if unavailable is not None:
            raise unavailable

    def recover(self) -> None:
        """Recover the worker's entries or leases on all streams. See Renewer."""
        for stream in list(self._streams.values()):
            if not stream.leaving:
                with exclude_on_error(stream):
                    self._renewer.recover(stream)

    def remove_reports(self) -> None:
        """Remove the reports of long runs, as the worker ends; if Redis does not answer, they expire."""
        try:
            report_long_runs(self._context.client, self._context.handler.app, (), self._hang_detector.end())
        except RedisError as error:
            logger.debug("cannot remove the reports of long runs: %s; they expire", error)

    @property
    def _renew_ms(self) -> float:
        return self._policy.claim_ms / _RENEWALS_PER_CLAIM

    @property
    def _interval_ms(self) -> float:
        # The more streams there are, the less often each is refreshed.
        return min(max(self._policy.sweep_ms, _REFRESH_MS_EACH * len(self._streams)), self._renew_ms)

    # Streams

    def _maintain_all(self) -> Unavailable | None:
        """Maintain each stream. Return the error that kept some streams from it, except OutOfMemory."""
        began_ms = self._clock.monotonic_ms()
        renews = began_ms >= self._renew_due_ms
        committed = self._loop_metrics.done
        first = ((one, partial(self._maintain, one, refresh, renews=renews)) for one, refresh in self._refresh_all())
        done, errors = self._do_each(first, began_ms + self._renew_ms)
        # A server that hangs has used up the first deadline, and would use up the second one, too.
        reached = [one for one in list(self._streams.values()) if one.stream in done and not one.leaving]
        further = self._renewer.further_steps(reached, renews=renews)
        errors += self._do_each(further, self._clock.monotonic_ms() + self._renew_ms / 2)[1]
        unavailable = next((one for one in reversed(errors) if not isinstance(one, OutOfMemory)), None)
        if unavailable is None and renews:
            self._renew_due_ms = began_ms + self._renew_ms
        if not errors:
            self._committed_at_trim = committed
        return unavailable

    def _do_each(self, steps: Iterable[Step], until_ms: float) -> tuple[set[str], list[Unavailable]]:
        """Do these steps; return the streams of those that were done, and the errors of those that failed.

        From `until_ms` on, the first such error ends it.
        """
        done: set[str] = set()
        errors: list[Unavailable] = []
        for stream, step in steps:
            try:
                with exclude_on_error(stream):
                    step()
            except OutOfMemory as error:
                errors.append(error)
                self._warnings.warn("maintenance of %s is incomplete: %s; retrying", stream.stream, error)
            except Unavailable as error:
                errors.append(error)  # perhaps only the server of this stream is unavailable
                if self._clock.monotonic_ms() > until_ms:
                    break
            else:
                done.add(stream.stream)
        return done, errors

    def _refresh_all(self) -> Iterator[tuple[S, Callable[[], object] | None]]:
        """Yield each stream with a function that applies the reply to its refresh; a round trip carries many.

        None in place of the function: nothing that a refresh reads has changed.
        """
        streams = {one.stream: one for one in list(self._streams.values())}
        query: Query = query_by(self._context.client) if len(streams) <= FEW_STREAMS else self._changed.query
        calls = {name: streams[name].refresh_call() for name in self._due_for_refresh(streams)}
        for name, refresh in ask_all(calls, query):
            yield streams.pop(name), refresh
        for stream in streams.values():
            yield stream, None

    def _due_for_refresh(self, streams: Mapping[str, S]) -> list[str]:
        """Return the names of these streams that have to be refreshed; all where the breaker may pause or resume."""
        if len(streams) <= FEW_STREAMS or self._context.breaker.is_open():
            return list(streams)
        try:
            found = self._changed.find(streams)
        except Unavailable:  # each refresh reports what is unavailable
            return list(streams)
        if self._changed.refused:
            return list(streams)
        paused = [name for name, one in streams.items() if one.pause is not None]  # a pause may end by itself
        self._unrefreshed = (self._unrefreshed & streams.keys()).union(found, paused)
        return list(self._unrefreshed)

    def _maintain(self, stream: S, refresh: Callable[[], object] | None, *, renews: bool) -> None:
        """Refresh, renew and trim one stream; of one that this worker leaves, only entries that still run are kept."""
        if refresh is not None and not stream.leaving:
            before = stream.pause
            refresh()
            if self._context.breaker.follow(stream, before):
                self.reread_pending.set()
            self._unrefreshed.discard(stream.stream)
        if renews:
            self._renewer.renew(stream)
        if self._policy.trim and not stream.leaving and self._committed_at_trim != self._loop_metrics.done:
            stream.trim()

    # Runs and figures

    @property
    def _begun_runs(self) -> list[Delivery]:
        """The runs that have not ended, but those that still ask for a permit."""
        return [one for one in self._in_flight.runs if not one.asks]

    def _check_time_limits(self) -> None:
        handler = self._context.handler
        now_ms = self._clock.monotonic_ms()
        given_up: list[Delivery] = []
        try:
            runs = self._begun_runs
            self._hang_detector.check(runs, now_ms)
            for one in runs:
                if now_ms - one.state_since_ms > handler.time_limit_ms + TIME_LIMIT_GRACE_MS:
                    if one in self._in_flight:  # else another worker has claimed it, or an operator skipped it
                        self._renewer.give_up(one)
                    given_up.append(one)
        except Unavailable as error:
            if not given_up and not isinstance(error, OutOfMemory):
                raise
            # The process ends only once the attempt is recorded; until then, other runs go on beside this one.
            self._warnings.warn("cannot give up a run that hangs: %s; retrying", error)
        if given_up:
            raise HandlerStuck(
                f"{handler.label} has run on message {given_up[0].id.decode()} of {given_up[0].stream.stream} for longer "
                f"than its time limit of {handler.time_limit_ms:,.0f} ms, and cannot be ended"
            )

    def _report(self) -> None:
        self._loop_metrics.set_in_flight(in_flight=len(self._in_flight), buffered=self._in_flight.buffer.qsize())
        self._loop_metrics.on_reply()
        self._context.steps.failures.report_omitted()
        runs, ended = self._hang_detector.due_reports(self._clock.monotonic_ms())
        report_long_runs(self._context.client, self._context.handler.app, runs, ended)
        self._run_times.report_if_due()
