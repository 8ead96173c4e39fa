"""The metric catalogue, and the Recorder that stores the values.

An engine reports to a `Metrics`, which discards everything; to export, it gets a `Recorder`, which a Prometheus
registry accepts as a collector. Names and units follow Prometheus' rules ("Metric and label naming"): base units,
`_total` for counters. No label is a key or a stream: there may be 100,000 of either, and the value of each label
combination stays in memory for good. The one exception is SPARK_STREAM_BEHIND, whose reporter removes all but a few.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import msgspec

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal[
    "messages", "bytes", "ratio", "consumers", "streams", "seconds", "times", "keys", "yes or no", "unix time"
]


class Metric(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One metric of the catalogue.

    * `name`: as exported, with the prefix `millstream_` and the unit
    * `kind`: its Prometheus type
    * `unit`: the unit of its values
    * `help`: one sentence for the reader of a dashboard
    * `labels`: names of its labels; each report gives all of them
    * `buckets`: upper bounds of a histogram's buckets, without the last, infinite one
    """

    name: str
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


CATALOGUE: list[Metric] = []
"""Every metric of millstream."""


def _counter(name: str, unit: Unit, text: str, *labels: str) -> Metric:
    return _listed(Metric(name=f"millstream_{name}_total", kind="counter", unit=unit, help=text, labels=labels))


def _gauge(name: str, unit: Unit, text: str, *labels: str) -> Metric:
    return _listed(Metric(name=f"millstream_{name}", kind="gauge", unit=unit, help=text, labels=labels))


def _seconds(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    name = f"millstream_{name}_seconds"
    return _listed(Metric(name=name, kind="histogram", unit="seconds", help=text, labels=labels, buckets=buckets))


def _listed(metric: Metric) -> Metric:
    CATALOGUE.append(metric)
    return metric


_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0)

READ = _counter("messages_read", "messages", "New messages read from their stream.", "handler")
COMMITTED = _counter(
    "messages_committed", "messages", "Messages that are done: processed, or dead-lettered.", "handler"
)
HEAD_OF_LINE_AVOIDED = _counter(
    "messages_head_of_line_avoided",
    "messages",
    "Messages of a key committed while an earlier one of their stream, of another key, was not done.",
    "handler",
)
RETRIED = _counter("messages_retried", "messages", "Failed runs with attempts left.", "handler")
LIMITED = _counter(
    "messages_limited", "times", "Refused runs: messages that wait for a permit of their handler's limit.", "handler"
)
PARKED = _counter("keys_parked", "times", "Keys parked until an operator acts.", "handler")
DEAD_LETTERED = _counter(
    "messages_dead_lettered", "messages", "Messages dead-lettered, by reason.", "handler", "reason"
)
RELEASED = _counter(
    "messages_released",
    "messages",
    "Messages released uncommitted by a worker that stopped, or whose breaker opened.",
    "handler",
)
CLAIMED = _counter(
    "messages_claimed",
    "messages",
    "Pending messages claimed from another worker, or from an earlier run of this one.",
    "handler",
)
TRIMMED = _counter("messages_trimmed", "messages", "Pending messages trimmed from their stream: lost.", "handler")
DELAYED_MOVED = _counter("delayed_messages_moved", "messages", "Delayed messages moved to their stream when due.")
REFUSED = _counter(
    "commits_refused", "messages", "Messages refused in a commit: another consumer owned them by then.", "handler"
)

HANDLER_SECONDS = _seconds("handler", "Duration of one handler run, failed runs included.", _SHORT, "handler")
COMMIT_SECONDS = _seconds(
    "commit", "Duration of one batch commit, from the call until the worker has read Redis' reply.", _SHORT, "handler"
)
AGE_SECONDS = _seconds("age", "Time from a message's entry id to its commit.", _LONG, "handler")

IN_FLIGHT = _gauge("messages_in_flight", "messages", "Messages fetched, neither committed nor released.", "handler")
IN_FLIGHT_BYTES = _gauge("in_flight_bytes", "bytes", "Field names and values of the messages in flight.", "handler")
BUDGET_REACHED = _counter(
    "in_flight_budget_reached", "times", "Fetching stopped because of too many bytes in flight.", "handler"
)
QUEUED = _gauge("messages_queued", "messages", "Messages in flight that wait for a run.", "handler")
RUNNING = _gauge("messages_running", "messages", "Messages that the handler runs on now.", "handler")
RUNNING_LIMIT = _gauge(
    "messages_running_limit",
    "messages",
    "Most messages that it may run on at once: --threads or concurrency, times the batch_size of a handler of lists.",
    "handler",
)
LONGEST_RUN = _gauge(
    "longest_run_seconds",
    "seconds",
    "How long the longest of its runs that have not ended has taken so far; 0 if there is none.",
    "handler",
)
WAITING_FOR_RATE = _gauge(
    "waiting_for_rate", "yes or no", "1 while reads of a stream wait for the handler's rate.", "handler"
)
LAST_POLL = _gauge(
    "last_poll_timestamp_seconds",
    "unix time",
    "When Redis last answered a read, or a status query while nothing was to be read.",
    "handler",
)

# Read from Redis, by one process for all of them: `admin/redis_metrics.py`.
LAG = _gauge(
    "lag_messages",
    "messages",
    "Messages that are not committed: unread, nacked, in key queues or in flight; a lower bound if they had to be counted.",
    "handler",
)
OLDEST_MESSAGE = _gauge(
    "oldest_message_seconds",
    "seconds",
    "Age of the oldest message that is not committed; 0 if there is none.",
    "handler",
)
DEAD_LETTERS = _gauge(
    "dead_letters",
    "messages",
    "Dead letters in Redis, by reason; `other` if unreadable or not among the newest 1,000 of their stream.",
    "handler",
    "reason",
)
DELAYED = _gauge("delayed_messages", "messages", "Delayed messages of its streams that are not due yet.", "handler")
KEYS = _gauge("keys", "keys", "Keys with messages, by state: ready, leased, backing_off or parked.", "handler", "state")
OLDEST_KEY = _gauge(
    "oldest_key_wait_seconds",
    "seconds",
    "Age of the oldest first message of the keys in a state, of at most 100 keys of each stream; 0 if there is none.",
    "handler",
    "state",
)
LOOK_AHEAD_USED = _gauge(
    "look_ahead_used_ratio",
    "ratio",
    "Used part of --look-ahead on the stream where it is greatest. At 1 no other key of the stream goes on.",
    "handler",
)
PAUSED = _gauge("paused", "yes or no", "1 while the handler is paused on all its streams.", "handler")
BREAKER_OPEN = _gauge(
    "breaker_open", "yes or no", "1 while its breaker pauses the handler on any of its streams.", "handler"
)
REDIS_READ_AT = _gauge(
    "redis_figures_timestamp_seconds",
    "unix time",
    "When the figures of the handler were last read from Redis.",
    "handler",
)
REDIS_UP = _gauge("redis_up", "yes or no", "1 if the figures of all handlers could be read from Redis the last time.")

WORKER_UP = _gauge("worker_up", "yes or no", "1 while a worker process runs and reports to its supervisor.", "worker")
WORKER_RESTARTS = _counter("worker_restarts", "times", "Worker processes that ended and were started again.", "worker")
BUILD_INFO = _gauge(
    "build_info",
    "yes or no",
    "1, with the versions of millstream and Python, and what runs.",
    "version",
    "python",
    "engine",
)

CONSUMERS = _gauge("consumers", "consumers", "Consumers registered with masters, by state.", "handler", "state")

LEASE_STREAMS = _gauge(
    "lease_streams",
    "streams",
    "Streams of a service: total, this consumer's share, and held by it.",
    "service",
    "state",
)
LEASES_ASSIGNED = _counter(
    "leases_assigned", "streams", "Streams assigned to this consumer by the balancer.", "service"
)
LEASES_ENDED = _counter(
    "leases_ended", "streams", "Ended leases of this consumer, by how they ended.", "service", "how"
)
LEASE_EXPIRATIONS = _counter(
    "lease_expirations_detected", "streams", "Leases of lost owners that this consumer found expired.", "service"
)
LEASE_HELD_SECONDS = _seconds("lease_held", "Time from the start of a lease to its end.", _LONG, "service")
LEASE_HEARTBEAT_SECONDS = _seconds(
    "lease_heartbeat", "Duration of one heartbeat, which renews all leases.", _SHORT, "service"
)
LEASE_RECOVERY_SECONDS = _seconds(
    "lease_recovery", "Time from the expiry of a lost owner's leases to its detection.", _SHORT, "service"
)
LEASE_CLAIMS = _counter("lease_claims", "times", "Explicit claims of the program, by outcome.", "service", "outcome")
LEASE_CLAIM_SECONDS = _seconds("lease_claim", "Duration of one explicit claim.", _SHORT, "service")
LEASE_NOTIFICATIONS = _counter(
    "lease_notifications", "times", "Notifications to the program, by kind.", "service", "notice"
)

ROUTER_SUBSCRIPTIONS = _gauge("router_subscriptions", "consumers", "Subscriptions of this process's router.")
ROUTER_STREAMS = _gauge("router_streams", "streams", "Streams with at least one subscription.")
ROUTER_BUFFERED_BYTES = _gauge("router_buffered_bytes", "bytes", "Bytes read and not yet consumed by subscribers.")
ROUTER_AT_BUDGET = _gauge("router_at_budget", "yes or no", "1 while the router may not read further ahead.")
ROUTER_CHANGED = _counter("router_streams_changed", "times", "Invalidations received: a stream has changed.")
ROUTER_POLLED = _counter("router_streams_polled", "times", "Streams read without an invalidation, as a safety check.")
ROUTER_GAPS = _counter("router_gaps", "times", "Gaps: entries removed before they were read, by reason.", "reason")
ROUTER_DROPPED = _counter(
    "router_messages_dropped", "messages", "Messages dropped for slow subscribers that chose dropping."
)

SPARK_ROWS = _counter(
    "spark_rows", "messages", "Rows read by the batches of a query; of a handler, its messages.", "query"
)
SPARK_BATCH_SECONDS = _seconds("spark_batch", "Duration of one batch of a query, with planning.", _LONG, "query")
SPARK_BEHIND = _gauge(
    "spark_behind_messages",
    "messages",
    "Messages behind the latest offset at the last batch, over its streams: min, avg, max and sum; NaN if unknown.",
    "query",
    "of",
)
SPARK_STREAM_BEHIND = _gauge(
    "spark_stream_behind_messages", "messages", "The same for each of the streams furthest behind.", "query", "stream"
)

SERVE_CONNECTIONS = _gauge("serve_connections", "consumers", "Open client connections, by kind.", "kind")
SERVE_SENT = _counter("serve_messages_sent", "messages", "Messages written to clients, by kind of connection.", "kind")
SERVE_DROPPED = _counter("serve_messages_dropped", "messages", "Messages dropped for slow clients.", "kind")
SERVE_ENDED = _counter("serve_connections_ended", "times", "Closed client connections, by reason.", "reason")
SERVE_REFUSED = _counter("serve_connections_refused", "times", "Refused client connections, by HTTP status.", "status")
HTTP_DROPPED = _counter(
    "http_connections_dropped",
    "times",
    "Connections closed before a request: late (no request in time) or crowded (too many).",
    "reason",
)

RECONNECTS = _counter("redis_reconnects", "times", "Consumption resumed after Redis was unavailable.")
REDIS_ERRORS = _counter("redis_errors", "times", "Reads refused or unanswered, by class of error.", "error")

PUBLISHED = _counter("messages_published", "messages", "Messages published and confirmed by Redis.")
PUBLISH_ERRORS = _counter("publish_errors", "times", "Batches given up, by class of error.", "error")
PUBLISH_SECONDS = _seconds("publish", "Duration of one batch, from the call to Redis' reply, with waits.", _SHORT)


class Metrics:
    """Receives metric values. This base class discards them, at the cost of a call; see `Recorder`.

    The labels are those of the metric, by name, with text values.
    """

    def count(self, metric: Metric, n: float = 1, /, **labels: str) -> None:
        """Add `n` to a counter."""

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Set a gauge."""

    def remove(self, metric: Metric, /, **labels: str) -> None:
        """Remove a gauge's value for these labels."""

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Add one value to a histogram, in its unit."""

    def observe_all(self, metric: Metric, values: Iterable[float], /, **labels: str) -> None:
        """Add many values to a histogram: cheaper than one by one."""


NO_METRICS = Metrics()
"""Discards all values."""


def init_series(metrics: Metrics, *series: Metric, **labels: str) -> None:
    """Create counters and histograms with the value 0: Prometheus sees no increase in one that appears with its event.

    Call it for each value of a label that is known at the start.
    """
    for metric in series:
        if metric.kind == "histogram":
            metrics.observe_all(metric, (), **labels)
        else:
            metrics.count(metric, 0, **labels)


Values = dict[tuple[str, ...], float | tuple[list[int], float]]
"""The values of one metric by those of its labels: a number, or the buckets and the sum of a histogram."""

Snapshot = dict[str, list[tuple[tuple[str, ...], float | tuple[list[int], float]]]]
"""All values of a recorder by metric, as JSON can hold them."""


class _Histogram(msgspec.Struct):
    """The number of values in each bucket, the infinite one last, and their sum."""

    counts: list[int]
    sum: float = 0.0


class _Series(msgspec.Struct):
    """The values of one metric, by its label values."""

    numbers: dict[tuple[str, ...], float] = msgspec.field(default_factory=dict)
    histograms: dict[tuple[str, ...], _Histogram] = msgspec.field(default_factory=dict)

    def values(self) -> Values:
        found: Values = dict(self.numbers)
        return found | {key: (list(one.counts), one.sum) for key, one in self.histograms.items()}


class Recorder(Metrics):
    """Stores the metrics of this process. Any thread may report and read.

    It is a Prometheus collector: `prometheus_client.REGISTRY.register(Recorder())` adds it to a program's own metrics,
    and `millstream.observability.metrics_and_health_server.HealthServer` serves it. Raises ConfigError for a metric of another kind, and
    for labels other than the metric's own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[Metric, _Series] = {}

    def count(self, metric: Metric, n: float = 1, /, **labels: str) -> None:
        """Add `n` to a counter."""
        key = _key(metric, "counter", labels)
        with self._lock:
            numbers = self._series_of(metric).numbers
            numbers[key] = numbers.get(key, 0) + n

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        key = _key(metric, "gauge", labels)
        with self._lock:
            self._series_of(metric).numbers[key] = value

    def remove(self, metric: Metric, /, **labels: str) -> None:
        """Remove a gauge's value for these labels."""
        key = _key(metric, "gauge", labels)
        with self._lock:
            self._series_of(metric).numbers.pop(key, None)

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Add one value to a histogram, in its unit."""
        self.observe_all(metric, (value,), **labels)

    def observe_all(self, metric: Metric, values: Iterable[float], /, **labels: str) -> None:
        """Add many values to a histogram: cheaper than one by one."""
        key = _key(metric, "histogram", labels)
        buckets = metric.buckets
        with self._lock:
            histograms = self._series_of(metric).histograms
            if (histogram := histograms.get(key)) is None:
                histogram = histograms[key] = _Histogram([0] * (len(buckets) + 1))
            counts = histogram.counts
            for value in values:
                counts[bisect_left(buckets, value)] += 1
                histogram.sum += value

    def value(self, metric: Metric, /, **labels: str) -> float:
        """The value of a counter or gauge, or the number of values in a histogram; 0 if nothing was reported."""
        key = _key(metric, metric.kind, labels)
        with self._lock:
            series = self._series_of(metric)
            histogram = series.histograms.get(key)
            return series.numbers.get(key, 0) if histogram is None else sum(histogram.counts)

    def snapshot(self) -> Snapshot:
        """All values, to be sent to another process. See `millstream.observability.merged_metrics`."""
        with self._lock:
            return {metric.name: list(series.values().items()) for metric, series in self._series.items()}

    def collect(self) -> "Iterator[Family]":
        """The metric families, for prometheus_client."""
        with self._lock:
            families = [family_of(metric, [((), series.values())]) for metric, series in self._series.items()]
        return iter(families)

    def _series_of(self, metric: Metric) -> _Series:
        if (series := self._series.get(metric)) is None:
            series = self._series[metric] = _Series()
        return series


def _key(metric: Metric, kind: Kind, labels: dict[str, str]) -> tuple[str, ...]:
    if metric.kind != kind:
        raise ConfigError(f"{metric.name} is a {metric.kind}, not a {kind}")
    names = metric.labels
    if len(labels) == len(names):
        try:
            return tuple([labels[name] for name in names])
        except KeyError:
            pass
    raise ConfigError(f"{metric.name} has the labels ({', '.join(names)}), not ({', '.join(labels)})")


def family_of(metric: Metric, groups: Iterable[tuple[tuple[str, ...], Values]], *more_labels: str) -> "Family":
    """The family of a metric for prometheus_client. Each group of values has a value for each of `more_labels`."""
    # Imported here: it takes longer to import than the rest of this module, and most commands export no metrics.
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    labels = (*metric.labels, *more_labels)
    bounds = [*map(str, metric.buckets), "+Inf"]
    histograms = HistogramMetricFamily(metric.name, metric.help, labels=labels)
    numbers = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
        metric.name, metric.help, labels=labels
    )
    for more, values in groups:
        for key, value in values.items():
            if isinstance(value, tuple):
                counts, total = value
                histograms.add_metric((*key, *more), list(zip(bounds, accumulate(counts), strict=True)), total)
            else:
                numbers.add_metric((*key, *more), value)
    return histograms if metric.kind == "histogram" else numbers


def exposition(recorder: Recorder) -> tuple[bytes, str]:
    """The metrics of `recorder` and of this process in Prometheus' text format, and its content type."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry()
    registry.register(recorder)
    ProcessCollector(registry=registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST
