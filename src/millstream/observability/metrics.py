"""What millstream measures: one typed catalogue, and the recorder that keeps the figures.

An engine reports to a `Metrics`, which does nothing; where somebody listens, it is a `Recorder`, which a Prometheus
registry takes as a collector. Names and units follow Prometheus' own rules ("Metric and label naming"): base units,
`_total` for counters. No label is a key or a stream, since there may be 100,000 of either, and a figure for each
combination of labels stays in memory for good. The one exception has a reporter that forgets all but a few.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["messages", "bytes", "ratio", "consumers", "streams", "seconds", "times", "yes or no", "unix time"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """One measured thing.

    * `name`: as it is exported, `millstream_` and unit included
    * `kind`: what it is to Prometheus
    * `unit`: what its numbers count
    * `help`: one sentence for whoever reads the figure
    * `labels`: what it is told apart by; all of them are given with each figure
    * `buckets`: upper bounds of a histogram, without the last, infinite one
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

READ = _counter("messages_read", "messages", "Read as new from their stream.", "handler")
COMMITTED = _counter("messages_committed", "messages", "Done: their effects are in Redis.", "handler")
RETRIED = _counter("messages_retried", "messages", "Runs that failed with attempts left.", "handler")
PARKED = _counter("keys_parked", "times", "Keys that were made to wait for a person.", "handler")
DEAD = _counter("messages_dead", "messages", "Became a dead letter, by its reason.", "handler", "reason")
HANDED_BACK = _counter(
    "messages_handed_back", "messages", "Given back uncommitted by a worker that stopped.", "handler"
)
ADOPTED = _counter(
    "messages_adopted", "messages", "Taken over from another worker, or from this one's last life.", "handler"
)
TRIMMED = _counter("messages_trimmed", "messages", "Gone from their stream while they were pending: lost.", "handler")
DELAYED_MOVED = _counter("messages_delayed_moved", "messages", "Delayed ones that came due and went to their stream.")
REFUSED = _counter("commits_refused", "messages", "Refused in a commit: another consumer had them by then.", "handler")

HANDLER_SECONDS = _seconds("handler", "One run of the handler, failed ones included.", _SHORT, "handler")
COMMIT_SECONDS = _seconds("commit", "One commit of a batch, from the call to Redis' answer.", _SHORT, "handler")
AGE_SECONDS = _seconds("age", "From a message's entry id to its commit.", _LONG, "handler")

IN_FLIGHT = _gauge("messages_in_flight", "messages", "In hand: taken, and neither committed nor given back.", "handler")
IN_HAND_BYTES = _gauge("in_hand_bytes", "bytes", "Names and values of the messages in hand.", "handler")
BUDGET_REACHED = _counter(
    "in_hand_budget_reached",
    "times",
    "No more was taken for a while, as what was in hand had too many bytes.",
    "handler",
)
BUFFERED = _gauge("messages_buffered", "messages", "Of those in hand: waiting for their turn.", "handler")
LAG = _gauge(
    "lag_messages", "messages", "Not yet read by the group, as Redis says; NaN while it cannot say.", "handler"
)
DEAD_LETTERS = _gauge(
    "dead_letters", "messages", "Dead letters that lie in Redis, whichever process wrote them.", "handler"
)
OLDEST_PENDING = _gauge("oldest_pending_seconds", "seconds", "Age of the oldest uncommitted entry.", "handler")
PAUSED = _gauge("paused", "yes or no", "1 while the handler is paused.", "handler")
LOOK_AHEAD_USED = _gauge(
    "look_ahead_used_ratio",
    "ratio",
    "Of --look-ahead, on the stream with most messages in the lines of keys; 0 below 0.8. At 1 no other key goes on.",
    "handler",
)
LAST_POLL = _gauge(
    "last_poll_timestamp_seconds",
    "unix time",
    "When Redis last answered a read, or a look while nothing was to be read.",
    "handler",
)

CONSUMERS = _gauge("consumers", "consumers", "Registered with masters, by what is thought of them.", "handler", "state")

LEASE_STREAMS = _gauge(
    "lease_streams", "streams", "Of a service: all, a consumer's share, and those it holds.", "service", "state"
)
LEASES_TAKEN = _counter("leases_taken", "streams", "Given to this consumer by shares.", "service")
LEASES_ENDED = _counter("leases_ended", "streams", "Leases of this consumer that ended, by how.", "service", "how")
LEASES_LOST = _counter("leases_found_lost", "streams", "Found by this consumer to have lost their owner.", "service")
LEASES_LASTED = _seconds("lease", "How long this consumer had a stream.", _LONG, "service")
LEASE_ROUND_SECONDS = _seconds("lease_round", "One renewal of all leases.", _SHORT, "service")
LEASE_RECOVERY_SECONDS = _seconds(
    "lease_recovery", "From the end of the leases of the dead to their discovery.", _SHORT, "service"
)
LEASE_CLAIMS = _counter("lease_claims", "times", "Claims by the program, by outcome.", "service", "outcome")
LEASE_CLAIM_SECONDS = _seconds("lease_claim", "One claim by the program.", _SHORT, "service")
LEASE_NOTICES = _counter("lease_notices", "times", "Notifications to the program, by kind.", "service", "notice")

ROUTER_SUBSCRIPTIONS = _gauge("router_subscriptions", "consumers", "Subscriptions of this process's router.")
ROUTER_STREAMS = _gauge("router_streams", "streams", "Streams that somebody is subscribed to.")
ROUTER_HELD_BYTES = _gauge("router_held_bytes", "bytes", "Read, and not yet taken by subscribers.")
ROUTER_AT_BUDGET = _gauge("router_at_budget", "yes or no", "1 while that is as much as the router may read ahead.")
ROUTER_CHANGED = _counter("router_streams_changed", "times", "Redis said that a stream had changed.")
ROUTER_RESWEPT = _counter("router_streams_reswept", "times", "Streams read without word of a change, to be safe.")
ROUTER_GAPS = _counter("router_gaps", "times", "Entries were gone before they were read, by reason.", "reason")
ROUTER_DROPPED = _counter("router_messages_dropped", "messages", "Dropped for subscribers that asked for it, too slow.")

SPARK_ROWS = _counter("spark_rows", "messages", "Read by the batches of a query, as Spark counts them.", "query")
SPARK_BATCH_SECONDS = _seconds("spark_batch", "One batch of a query, planning included.", _LONG, "query")
SPARK_BEHIND = _gauge(
    "spark_behind_messages",
    "messages",
    "Newer than what the last batch read, of its streams: the min, avg, max and sum; NaN if unknown.",
    "query",
    "of",
)
SPARK_STREAM_BEHIND = _gauge(
    "spark_stream_behind_messages", "messages", "The same for the streams that are furthest behind.", "query", "stream"
)

SERVE_CONNECTIONS = _gauge("serve_connections", "consumers", "Clients that follow streams now, by how.", "kind")
SERVE_SENT = _counter("serve_messages_sent", "messages", "Written to clients, by how these follow.", "kind")
SERVE_DROPPED = _counter("serve_messages_dropped", "messages", "Dropped for clients that were too slow.", "kind")
SERVE_ENDED = _counter("serve_connections_ended", "times", "Clients that follow no more, by reason.", "reason")
SERVE_REFUSED = _counter("serve_connections_refused", "times", "Clients turned away, by HTTP status.", "status")
HTTP_CUT = _counter(
    "http_connections_cut", "times", "Connections closed that sent no request, by why: late or crowded.", "reason"
)

RECONNECTS = _counter("redis_reconnects", "times", "Consumption resumed after Redis had been away.")
REDIS_ERRORS = _counter("redis_errors", "times", "Reads refused or unanswered, by class of error.", "error")

PUBLISHED = _counter("messages_published", "messages", "Published and confirmed by Redis.")
PUBLISH_ERRORS = _counter("publish_errors", "times", "Batches given up, by class of error.", "error")
PUBLISH_SECONDS = _seconds("publish", "One batch, from the call to Redis' answer, waits included.", _SHORT)


class Metrics:
    """Where figures are reported to. This one forgets them, at the cost of a call; see `Recorder`.

    The labels are those of the metric, by name, with values as text.
    """

    def count(self, metric: Metric, n: float = 1, /, **labels: str) -> None:
        """Add `n` to a counter."""

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Say what a gauge stands at."""

    def forget(self, metric: Metric, /, **labels: str) -> None:
        """Say no more what a gauge stands at."""

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Put one value into a histogram, in its unit."""

    def observe_all(self, metric: Metric, values: Iterable[float], /, **labels: str) -> None:
        """Put many values into a histogram: cheaper than one by one."""


NOBODY = Metrics()
"""Nobody listens."""


def begin_at_zero(metrics: Metrics, *counters: Metric, **labels: str) -> None:
    """Have counters be there before their first event: Prometheus sees no increase in one that appears with it."""
    for counter in counters:
        metrics.count(counter, 0, **labels)


@dataclass(slots=True)
class _Histogram:
    """How many values fell into each bucket, the infinite one last, and what they sum to."""

    counts: list[int]
    sum: float = 0.0


@dataclass(slots=True)
class _Series:
    """The figures of one metric, by the values of its labels."""

    numbers: dict[tuple[str, ...], float] = field(default_factory=dict)
    histograms: dict[tuple[str, ...], _Histogram] = field(default_factory=dict)


class Recorder(Metrics):
    """Keeps the figures of this process. Any thread may report and read.

    It is a collector: `prometheus_client.REGISTRY.register(Recorder())` adds it to what a program exports already,
    and `millstream.observability.health.HealthServer` serves it. Raises ConfigError for a metric of another kind or labels that
    are not exactly the metric's own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[Metric, _Series] = {}

    def count(self, metric: Metric, n: float = 1, /, **labels: str) -> None:
        """Add `n` to a counter."""
        key = _key(metric, "counter", labels)
        with self._lock:
            numbers = self._of(metric).numbers
            numbers[key] = numbers.get(key, 0) + n

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Say what a gauge stands at."""
        key = _key(metric, "gauge", labels)
        with self._lock:
            self._of(metric).numbers[key] = value

    def forget(self, metric: Metric, /, **labels: str) -> None:
        """Say no more what a gauge stands at."""
        key = _key(metric, "gauge", labels)
        with self._lock:
            self._of(metric).numbers.pop(key, None)

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Put one value into a histogram, in its unit."""
        self.observe_all(metric, (value,), **labels)

    def observe_all(self, metric: Metric, values: Iterable[float], /, **labels: str) -> None:
        """Put many values into a histogram: cheaper than one by one."""
        key = _key(metric, "histogram", labels)
        buckets = metric.buckets
        with self._lock:
            histograms = self._of(metric).histograms
            if (histogram := histograms.get(key)) is None:
                histogram = histograms[key] = _Histogram([0] * (len(buckets) + 1))
            counts = histogram.counts
            for value in values:
                counts[bisect_left(buckets, value)] += 1
                histogram.sum += value

    def value(self, metric: Metric, /, **labels: str) -> float:
        """What a counter or gauge stands at, or how many values a histogram holds; 0 if nothing was reported."""
        key = _key(metric, metric.kind, labels)
        with self._lock:
            series = self._of(metric)
            histogram = series.histograms.get(key)
            return series.numbers.get(key, 0) if histogram is None else sum(histogram.counts)

    def collect(self) -> "Iterator[Family]":
        """The figures as prometheus_client wants them."""
        with self._lock:
            families = [_family(metric, series) for metric, series in self._series.items()]
        return iter(families)

    def _of(self, metric: Metric) -> _Series:
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


def _family(metric: Metric, series: _Series) -> "Family":
    # Imported here: it costs more to load than all the rest of this module, and most commands export nothing.
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        bounds = [*map(str, metric.buckets), "+Inf"]
        for key, found in series.histograms.items():
            histograms.add_metric(key, list(zip(bounds, accumulate(found.counts), strict=True)), found.sum)
        return histograms
    family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    numbers = family(metric.name, metric.help, labels=metric.labels)
    for key, number in series.numbers.items():
        numbers.add_metric(key, number)
    return numbers


def exposition(recorder: Recorder) -> tuple[bytes, str]:
    """The figures, and those of this process, as Prometheus reads them; and the content type of that."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry()
    registry.register(recorder)
    ProcessCollector(registry=registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST
