"""MergedMetrics: the metrics of several processes on one page, each under the name of its worker.

A worker process that dies is replaced by another of the same name, which counts from 0. The sum of all of them is
exported, so that no counter goes back.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from millstream.observability.metrics import CATALOGUE, Metric, Values, family_of

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

LABEL = "worker"
"""The label that holds the name of a process."""

_BY_NAME = {metric.name: metric for metric in CATALOGUE}


class _Worker(msgspec.Struct):
    """The values reported by the processes of one name: of the live one, and the totals of those that have ended."""

    process_id: int | None = None
    current: dict[Metric, Values] = msgspec.field(default_factory=dict)
    ended: dict[Metric, Values] = msgspec.field(default_factory=dict)

    def end(self) -> None:
        """End the process: its counts stay, its gauges are removed."""
        for metric, values in self.current.items():
            if metric.kind != "gauge":
                self.ended[metric] = _sum(self.ended.get(metric, {}), values)
        self.current = {}
        self.process_id = None

    def values(self, metric: Metric) -> Values:
        return _sum(self.ended.get(metric, {}), self.current.get(metric, {}))


class MergedMetrics:
    """The metrics of worker processes by name, as a Prometheus collector. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[str, _Worker] = {}

    def begin(self, worker: str, snapshot: Mapping[str, Sequence[Any]]) -> None:
        """Show these values of a worker until its first process reports: its counters, at 0."""
        with self._lock:
            self._workers[worker] = _Worker(ended={_BY_NAME[name]: _parse(values) for name, values in snapshot.items()})

    def update(self, worker: str, process_id: int, snapshot: Mapping[str, Sequence[Any]]) -> None:
        """Take over the values of a process: those of its `Recorder.snapshot`, which may have come as JSON."""
        current = {_BY_NAME[name]: _parse(values) for name, values in snapshot.items()}
        with self._lock:
            known = self._workers.setdefault(worker, _Worker())
            if known.process_id != process_id:
                known.end()
            known.process_id, known.current = process_id, current

    def end(self, worker: str) -> None:
        """The process of this name has ended."""
        with self._lock:
            self._workers.setdefault(worker, _Worker()).end()

    def collect(self) -> "Iterator[Family]":
        """The metric families, for prometheus_client, and those of each living process: CPU, memory, open files."""
        with self._lock:
            found = {
                metric: [
                    ((name,), values) for name, worker in self._workers.items() if (values := worker.values(metric))
                ]
                for metric in CATALOGUE
            }
            living = {name: one.process_id for name, one in self._workers.items() if one.process_id is not None}
        yield from (family_of(metric, groups, LABEL) for metric, groups in found.items() if groups)
        for name, process_id in living.items():
            yield from _of_process(name, process_id)


def _of_process(worker: str, process_id: int) -> "Iterator[Family]":
    from prometheus_client import ProcessCollector

    for family in ProcessCollector(pid=lambda: process_id, registry=None).collect():
        family.samples = [one._replace(labels={**one.labels, LABEL: worker}) for one in family.samples]
        yield family


def _parse(values: Sequence[Any]) -> Values:
    """The values of one metric, from JSON, which has no NaN."""
    return {
        tuple(key): (value[0], value[1]) if isinstance(value, (list, tuple)) else math.nan if value is None else value
        for key, value in values
    }


def _sum(first: Values, second: Values) -> Values:
    found = dict(first)
    for key, value in second.items():
        known = found.get(key)
        if known is None:
            found[key] = value
        elif isinstance(known, tuple) and isinstance(value, tuple):
            found[key] = ([a + b for a, b in zip(known[0], value[0], strict=True)], known[1] + value[1])
        elif not isinstance(known, tuple) and not isinstance(value, tuple):
            found[key] = known + value
    return found
