"""Who reads what, and how far behind: each handler, stage and other consumer group over all its streams. No I/O."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from millstream.admin.reports import GroupReport, HandlerReport, Inspection, StreamReport
from millstream.redis_client.key_names import stage_of

Kind = Literal["handler", "stage", "group"]

_FURTHEST = 20


@dataclass(frozen=True, kw_only=True)
class ReaderReport:
    """What reads under one name, over all its streams.

    * `name`: of a handler or stage with its app, `app.name`; of another group its own
    * `how`: how it reads, where that differs all ways: "workers" or "spark", "by key"; "spark, stage"; "consumers", or
      "spark, readAs=group" where a query takes part
    * `at_work`: how many workers, runs or consumers are alive
    * `behind`: entries that are not committed, over all its streams: a lower bound unless `exact`; None if it is known of
      no stream. `least`, `mean`, `most`: the same of a stream
    * `furthest`: the streams that are furthest behind, and how far, up to twenty
    * `oldest_age_ms`: age of the first of these entries
    * `pending`: entries that somebody has in hand, or that Spark has set aside
    * `parked`: keys that wait for a person
    * `waiting`: dead letters
    * `paused`: streams of which its workers read nothing new for now
    * `arrived`: entries that were ever added to its streams; `done`: how many of them it has committed, of groups and
      stages: was given or has passed; None if that is not known
    """

    name: str
    kind: Kind
    how: tuple[str, ...]
    at_work: int
    streams: int
    behind: int | None
    exact: bool
    least: int | None
    mean: float | None
    most: int | None
    furthest: tuple[tuple[str, int], ...]
    oldest_age_ms: int | None
    pending: int
    parked: int
    waiting: int
    paused: int
    arrived: int
    done: int | None


@dataclass(frozen=True, kw_only=True)
class _Place:
    """What is known of a reader on one stream."""

    stream: StreamReport | None
    how: str
    alive: Sequence[str]
    report: HandlerReport | GroupReport
    done: int | None


def readers(found: Inspection) -> tuple[ReaderReport, ...]:
    """Sum up what was found, sorted by kind and name: handlers, stages, groups."""
    streams = {stream.name: stream for stream in found.streams}
    places: dict[tuple[Kind, str], list[tuple[str, _Place]]] = defaultdict(list)
    for handler in found.handlers:
        how = handler.engine + (" by key" if handler.keyed else "")
        place = _Place(
            stream=streams.get(handler.stream), how=how, alive=handler.workers, report=handler, done=handler.committed
        )
        places["handler", f"{handler.app}.{handler.handler}"].append((handler.stream, place))
    for stream in found.streams:
        for group in stream.groups:
            if group.counted:
                kind, name, how = _about(group)
                place = _Place(stream=stream, how=how, alive=group.alive, report=group, done=group.read)
                places[kind, name].append((stream.name, place))
    order: tuple[Kind, ...] = ("handler", "stage", "group")
    return tuple(_summed(*one, places[one]) for one in sorted(places, key=lambda one: (order.index(one[0]), one[1])))


def _about(group: GroupReport) -> tuple[Kind, str, str]:
    stage = stage_of(group.name)
    if stage is not None:
        return "stage", ".".join(stage), "spark, stage"
    return "group", group.name, "spark, readAs=group" if group.shared else "consumers"


def _summed(kind: Kind, name: str, places: Sequence[tuple[str, _Place]]) -> ReaderReport:
    reports = [place.report for _, place in places]
    handlers = [report for report in reports if isinstance(report, HandlerReport)]
    known = [(stream, place.report.lag) for stream, place in places if place.report.lag is not None]
    counts = [count for _, count in known]
    furthest = sorted(((stream, count) for stream, count in known if count), key=lambda one: (-one[1], one[0]))
    done = [place.done for _, place in places]
    return ReaderReport(
        name=name, kind=kind,
        how=tuple(sorted({place.how for _, place in places})),
        at_work=len({who for _, place in places for who in place.alive}),
        streams=len(places),
        behind=sum(counts) if counts else None,
        exact=all(report.lag_exact for report in reports),
        least=min(counts, default=None),
        mean=sum(counts) / len(counts) if counts else None,
        most=max(counts, default=None),
        furthest=tuple(furthest[:_FURTHEST]),
        oldest_age_ms=_oldest(report.oldest_age_ms for report in reports),
        pending=sum(report.pending for report in reports),
        parked=sum(one.parked for one in handlers),
        waiting=sum(one.waiting for one in handlers),
        paused=sum(one.paused for one in handlers),
        arrived=sum(place.stream.added for _, place in places if place.stream is not None),
        done=None if None in done else sum(one or 0 for one in done),
    )  # fmt: skip


def _oldest(ages: Iterable[int | None]) -> int | None:
    return max((age for age in ages if age is not None), default=None)
