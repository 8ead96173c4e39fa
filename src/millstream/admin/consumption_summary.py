"""ReaderReport: sums up each handler, stage and other consumer group over its streams. No I/O."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from millstream.admin.reports import GroupReport, HandlerReport, Inspection, StreamReport
from millstream.redis_client.key_names import stage_of

ReaderKind = Literal["handler", "stage", "group"]
Status = Literal[
    "unreadable", "no consumers", "paused", "not running", "crash loop", "partly paused", "running", "idle"
]

_LARGEST = 20


@dataclass(frozen=True, kw_only=True)
class ReaderReport:
    """One reader, summed up over all its streams.

    * `name`: `app.name` of a handler or stage; a group's own name
    * `modes`: how it reads, all of them if streams differ: "workers" or "spark", with "by key"; "spark, stage";
      "consumers", or "spark, readAs=group" if a query is one of the consumers
    * `alive`: number of live workers, runs or consumers
    * `status`: the first of these that holds. "unreadable": its keys on a stream hold foreign data; "no
      consumers": a group that has none; "paused" on all its streams; "not running": entries wait and nothing is
      alive; "crash loop": its app's worker processes end again and again;
      "partly paused"; "running"; "idle": nothing waits and nothing is alive
    * `lag`: uncommitted entries over all its streams: a lower bound unless `lag_exact`; None if unknown for all
      streams. `lag_min`, `lag_avg`, `lag_max`: the same per stream
    * `largest_lags`: the streams with the largest lags, and these, up to twenty
    * `oldest_age_ms`: age of the first uncommitted entry
    * `pending`: entries in flight, nacked, in key queues, or deferred by Spark; `in_flight`: those of them that workers
      have; None if unknown, as for stages and groups
    * `parked`, `backing_off`: parked keys, and keys that wait for the next attempt: both are stuck
    * `blocked`: keys whose first message is retried without end, whether they back off or run again just now
    * `dead_letters`: dead letters in Redis
    * `paused`: number of its paused streams
    * `added`: entries ever added to its streams; `done`: the number of them that a handler has committed, a group was
      delivered or a stage has passed; None if unknown
    """

    name: str
    kind: ReaderKind
    modes: tuple[str, ...]
    alive: int
    status: Status
    streams: int
    lag: int | None
    lag_exact: bool
    lag_min: int | None
    lag_avg: float | None
    lag_max: int | None
    largest_lags: tuple[tuple[str, int], ...]
    oldest_age_ms: int | None
    pending: int
    in_flight: int | None
    parked: int
    backing_off: int
    blocked: int
    dead_letters: int
    paused: int
    added: int
    done: int | None

    @property
    def needs_attention(self) -> bool:
        """True if an operator has to act."""
        ill = self.status in ("unreadable", "not running", "crash loop", "paused", "partly paused")
        return ill or self.dead_letters > 0 or self.parked > 0 or self.blocked > 0


@dataclass(frozen=True, kw_only=True)
class _ReaderOnStream:
    """One reader on one stream."""

    stream: StreamReport | None
    mode: str
    alive: Sequence[str]
    report: HandlerReport | GroupReport
    done: int | None


def summarize_readers(found: Inspection) -> tuple[ReaderReport, ...]:
    """The readers of an inspection, sorted by kind (handlers, stages, groups) and name."""
    streams = {stream.name: stream for stream in found.streams}
    grouped: dict[tuple[ReaderKind, str], list[tuple[str, _ReaderOnStream]]] = defaultdict(list)
    for handler in found.handlers:
        one = _ReaderOnStream(
            stream=streams.get(handler.stream),
            mode=handler.mode,
            alive=handler.workers,
            report=handler,
            done=handler.committed,
        )
        grouped["handler", handler.label].append((handler.stream, one))
    for stream in found.streams:
        for group in stream.groups:
            if group.has_lag:
                kind, name, mode = _identify(group)
                one = _ReaderOnStream(
                    stream=stream, mode=mode, alive=group.alive, report=group, done=group.entries_read
                )
                grouped[kind, name].append((stream.name, one))
    order: tuple[ReaderKind, ...] = ("handler", "stage", "group")
    names = sorted(grouped, key=lambda name: (order.index(name[0]), name[1]))
    crashing = frozenset(one.app for one in found.restarts if one.is_crash_loop)
    return tuple(_summed(*name, grouped[name], crashing) for name in names)


def _identify(group: GroupReport) -> tuple[ReaderKind, str, str]:
    stage = stage_of(group.name)
    if stage is not None:
        return "stage", ".".join(stage), "spark, stage"
    return "group", group.name, "spark, readAs=group" if group.shared else "consumers"


def _summed(
    kind: ReaderKind, name: str, on_streams: Sequence[tuple[str, _ReaderOnStream]], crashing: Collection[str]
) -> ReaderReport:
    reports = [one.report for _, one in on_streams]
    handlers = [report for report in reports if isinstance(report, HandlerReport)]
    known = [(stream, one.report.lag) for stream, one in on_streams if one.report.lag is not None]
    lags = [lag for _, lag in known]
    largest = sorted(((stream, lag) for stream, lag in known if lag), key=lambda one: (-one[1], one[0]))
    done = [one.done for _, one in on_streams]
    alive = len({name for _, one in on_streams for name in one.alive})
    return ReaderReport(
        name=name,
        kind=kind,
        modes=tuple(sorted({one.mode for _, one in on_streams})),
        alive=alive,
        status=_status(kind, reports, crashing, alive=alive),
        streams=len(on_streams),
        lag=sum(lags) if lags else None,
        lag_exact=all(report.lag_exact for report in reports),
        lag_min=min(lags, default=None),
        lag_avg=sum(lags) / len(lags) if lags else None,
        lag_max=max(lags, default=None),
        largest_lags=tuple(largest[:_LARGEST]),
        oldest_age_ms=_oldest(report.oldest_age_ms for report in reports),
        pending=sum(report.pending for report in reports),
        in_flight=sum(one.in_flight for one in handlers) if kind == "handler" else None,
        parked=sum(one.parked for one in handlers),
        backing_off=sum(one.backing_off for one in handlers),
        blocked=sum(one.blocked for one in handlers),
        dead_letters=sum(one.dead_letters for one in handlers),
        paused=sum(one.paused for one in handlers),
        added=sum(one.stream.added for _, one in on_streams if one.stream is not None),
        done=None if None in done else sum(one or 0 for one in done),
    )


def _status(
    kind: ReaderKind, reports: Sequence[HandlerReport | GroupReport], crashing: Collection[str], *, alive: int
) -> Status:
    handlers = [report for report in reports if isinstance(report, HandlerReport)]
    if kind == "group" and not any(one.consumers for one in reports):
        return "no consumers"  # as of a query that shows its progress by a group: whether it runs is not known
    return status_of(
        is_readable=all(one.problem is None for one in handlers),
        streams=len(handlers),
        paused=sum(one.paused for one in handlers),
        alive=alive,
        lag=sum(report.lag or 0 for report in reports),
        is_crashing=any(one.app in crashing and one.engine == "workers" for one in handlers),
    )


def status_of(*, is_readable: bool, streams: int, paused: int, alive: int, lag: int, is_crashing: bool) -> Status:
    """The status of a reader with `lag` entries before it, of whose `streams` some are paused; `alive`: workers and runs."""
    if not is_readable:
        return "unreadable"
    if paused and paused == streams:
        return "paused"
    if not alive and lag:
        return "not running"  # also where its supervisor was killed in the end: starting it is what helps first
    if is_crashing:
        return "crash loop"
    return "partly paused" if paused else "running" if alive else "idle"


def _oldest(ages: Iterable[int | None]) -> int | None:
    return max((age for age in ages if age is not None), default=None)
