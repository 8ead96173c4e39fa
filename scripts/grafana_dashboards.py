"""Writes deploy/grafana/dashboards: dashboards for Grafana 11 and newer, from the catalogue of metrics.

    python scripts/grafana_dashboards.py

`tests/unit/test_dashboards.py` compares the files with this program. Each query is made of a metric of the catalogue and
of labels that it has; a label that it lacks is an error here.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from millstream.observability import metrics as m
from millstream.observability.merged_metrics import LABEL as WORKER
from millstream.observability.metrics import Metric

FOLDER = Path(__file__).parents[1] / "deploy/grafana/dashboards"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39
"""That of Grafana 11; newer ones migrate it when they load it."""
SCRAPED = {WORKER, "instance", "job"}
"""Labels that the supervisor and Prometheus add to those of the catalogue."""
FILTERS = ("handler", "query", "service")
"""Labels by which a reader chooses what is shown, where the metric has them."""
WIDTH = 24
UNITS: Mapping[str, str] = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}
"""Grafana's names of units; all others are plain numbers."""
RATES: Mapping[str, str] = {"messages": "mps"}
"""Grafana's names of units a second; all others are counts a second."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel: its queries, each with the legend of its series, and how it shows them.

    * `unit`: Grafana's name of the unit
    * `text`: its description
    * `kind`: the plugin that draws it
    * `red_from`: the value from which a number is shown in red
    * `width`: of the 24 columns of a dashboard
    """

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str
    text: str
    kind: Literal["timeseries", "stat"] = "timeseries"
    red_from: float | None = None
    width: int = 8


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One file: rows of panels by the title of the row, and the metric that lists the values of each filter.

    * `only_listed`: filters whose "All" means the listed values; that of the others means all series
    """

    name: str
    title: str
    text: str
    rows: Mapping[str, Sequence[Panel]]
    filters: Mapping[str, Metric]
    only_listed: frozenset[str] = frozenset()


def selected(metric: Metric, end: str = "", matched: str = "") -> str:
    """The series of a metric that the reader has chosen, such as `millstream_lag_messages{handler=~"$handler"}`."""
    matchers = [f'{label}=~"${label}"' for label in FILTERS if label in metric.labels]
    matchers += [matched] if matched else []
    return f"{metric.name}{end}{{{', '.join(matchers)}}}" if matchers else f"{metric.name}{end}"


def grouped(how: str, metric: Metric, labels: Sequence[str], series: str) -> str:
    """An aggregation that leaves these labels. Raises ValueError for one that the metric lacks."""
    if wrong := set(labels) - {*metric.labels, *SCRAPED, "le"}:
        raise ValueError(f"{metric.name} has no label {', '.join(sorted(wrong))}")
    return f"{how} by ({', '.join(labels)}) ({series})" if labels else f"{how}({series})"


def legend(labels: Sequence[str], more: str = "") -> str:
    """The legend of series with these labels."""
    return " ".join([*(f"{{{{{label}}}}}" for label in labels), *([more] if more else [])]) or "all"


def rates(title: str, metric: Metric, *labels: str) -> Panel:
    """How much a counter grows a second."""
    query = grouped("sum", metric, labels, f"rate({selected(metric)}[$__rate_interval])")
    return Panel(title=title, queries=[(query, legend(labels))], unit=RATES.get(metric.unit, "cps"), text=metric.help)


def increases(title: str, metric: Metric, *labels: str) -> Panel:
    """How often something rare has happened, within each interval of the picture."""
    query = grouped("sum", metric, labels, f"increase({selected(metric)}[$__rate_interval])")
    return Panel(title=title, queries=[(query, legend(labels))], unit="short", text=metric.help)


def quantiles(title: str, metric: Metric, *labels: str) -> Panel:
    """The median and the 99th percentile of a histogram."""
    buckets = f"rate({selected(metric, '_bucket')}[$__rate_interval])"
    inner = grouped("sum", metric, (*labels, "le"), buckets)
    queries = [(f"histogram_quantile({q}, {inner})", legend(labels, p)) for q, p in ((0.5, "p50"), (0.99, "p99"))]
    return Panel(title=title, queries=queries, unit="s", text=metric.help)


def levels(title: str, metric: Metric, *labels: str, how: str = "sum", matched: str = "") -> Panel:
    """The value of a gauge: `sum` of the processes, or `max` where each of them has the same."""
    query = grouped(how, metric, labels, selected(metric, matched=matched))
    return Panel(title=title, queries=[(query, legend(labels))], unit=UNITS.get(metric.unit, "short"), text=metric.help)


def ages(title: str, metric: Metric, *labels: str) -> Panel:
    """The time that has passed since a gauge's time."""
    query = grouped("max", metric, labels, f"time() - {selected(metric)}")
    return Panel(title=title, queries=[(query, legend(labels))], unit="s", text=metric.help)


def number(title: str, metric: Metric, query: str, *, red_from: float | None = None, width: int = 4) -> Panel:
    """One number for all that is chosen."""
    unit = UNITS.get(metric.unit, "short")
    queries = [(query, "all")]
    return Panel(title=title, queries=queries, unit=unit, text=metric.help, kind="stat", red_from=red_from, width=width)


def side_by_side(title: str, first: tuple[Panel, str], second: tuple[Panel, str]) -> Panel:
    """Two panels of one unit as one, each with a word for its series."""
    queries = [(query, f"{shown} {word}") for panel, word in (first, second) for query, shown in panel.queries]
    text = f"{second[1]}: {second[0].text} {first[1]}: {first[0].text}"
    return Panel(title=title, queries=queries, unit=first[0].unit, text=text)


def highest(metric: Metric, *labels: str, matched: str = "") -> str:
    """A figure from Redis, which each process exports alike."""
    return grouped("max", metric, labels, selected(metric, matched=matched))


def now() -> list[Panel]:
    """What an operator looks at first."""
    parked = highest(m.KEYS, "handler", matched='state="parked"')
    lost = f"sum(increase({selected(m.TRIMMED)}[$__range]))"
    firing = 'sum by (alertname, handler) (ALERTS{alertname=~"Millstream.+", alertstate="firing"})'
    return [
        number("Messages waiting", m.LAG, f"sum({highest(m.LAG, 'handler')})"),
        number("Oldest message", m.OLDEST_MESSAGE, highest(m.OLDEST_MESSAGE), red_from=300),
        number("Dead letters", m.DEAD_LETTERS, f"sum({highest(m.DEAD_LETTERS, 'handler', 'reason')})", red_from=1),
        number("Parked keys", m.KEYS, f"sum({parked})", red_from=1),
        number("Lost in this time", m.TRIMMED, lost, red_from=1),
        number("Worker processes", m.WORKER_UP, f"sum({selected(m.WORKER_UP)})"),
        Panel(
            title="Alerts that fire",
            queries=[(firing, "{{alertname}} {{handler}}")],
            unit="short",
            text="Of deploy/prometheus/rules.yaml, while Prometheus evaluates it.",
            width=24,
        ),
    ]


def handlers() -> Dashboard:
    """Workers and runs, handler by handler."""
    running = levels("", m.RUNNING, "handler"), "running"
    limit = levels("", m.RUNNING_LIMIT, "handler"), "limit"
    paused = levels("", m.PAUSED, "handler", how="max"), "paused"
    breaker = levels("", m.BREAKER_OPEN, "handler", how="max"), "breaker open"
    rows = {
        "Now": now(),
        "Throughput": [
            rates("Done a second", m.COMMITTED, "handler"),
            rates("Read a second", m.READ, "handler"),
            rates("Done a second without waiting for another key", m.HEAD_OF_LINE_AVOIDED, "handler"),
            rates("Retries a second", m.RETRIED, "handler"),
            rates("Refused by the limit a second", m.LIMITED, "handler"),
            quantiles("Handler run", m.HANDLER_SECONDS, "handler"),
            quantiles("Commit", m.COMMIT_SECONDS, "handler"),
            quantiles("Age when done", m.AGE_SECONDS, "handler"),
        ],
        "Backlog": [
            levels("Lag", m.LAG, "handler", how="max"),
            levels("Age of the oldest message", m.OLDEST_MESSAGE, "handler", how="max"),
            levels("Delayed messages", m.DELAYED, "handler", how="max"),
            levels("Keys with messages", m.KEYS, "handler", "state", how="max"),
            levels("Longest wait of a key", m.OLDEST_KEY, "handler", "state", how="max"),
            levels("Look-ahead used", m.LOOK_AHEAD_USED, "handler", how="max"),
        ],
        "Failures": [
            levels("Dead letters in Redis, by reason", m.DEAD_LETTERS, "handler", "reason", how="max"),
            increases("New dead letters, by reason", m.DEAD_LETTERED, "handler", "reason"),
            increases("Keys parked", m.PARKED, "handler"),
            side_by_side("Paused, by an operator or by the breaker", paused, breaker),
            increases("Commits refused", m.REFUSED, "handler"),
            increases("Messages trimmed while pending: lost", m.TRIMMED, "handler"),
        ],
        "Workers": [
            levels("Messages in flight", m.IN_FLIGHT, "handler"),
            levels("Bytes in flight", m.IN_FLIGHT_BYTES, "handler"),
            levels("In flight, waiting for a run", m.QUEUED, "handler"),
            side_by_side("Running, and how many may run", running, limit),
            levels("Longest run", m.LONGEST_RUN, "handler", how="max"),
            levels("Waiting for the handler's rate", m.WAITING_FOR_RATE, "handler", how="max"),
            increases("Claimed from other workers", m.CLAIMED, "handler"),
            increases("Released", m.RELEASED, "handler"),
            increases("Fetching stopped by the bytes in flight", m.BUDGET_REACHED, "handler"),
        ],
        "Processes and Redis": processes(),
        "Producers": [
            rates("Published a second", m.PUBLISHED),
            quantiles("Publish", m.PUBLISH_SECONDS),
            increases("Batches given up", m.PUBLISH_ERRORS, "error"),
            rates("Delayed messages moved a second", m.DELAYED_MOVED),
        ],
    }
    text = "Rates, backlog, failures and workers of each handler, on workers and on Spark."
    return Dashboard(name="handlers", title="millstream: handlers", text=text, rows=rows, filters={"handler": m.LAG})


def processes() -> list[Panel]:
    """Processes of workers, and their connection to Redis."""
    return [
        levels("Processes up", m.WORKER_UP, WORKER, how="max"),
        increases("Processes restarted", m.WORKER_RESTARTS, WORKER),
        ages("Since Redis last answered a read", m.LAST_POLL, "handler", WORKER),
        increases("Reconnects", m.RECONNECTS),
        increases("Reads refused or unanswered, by error", m.REDIS_ERRORS, "error"),
        levels("Figures from Redis can be read", m.REDIS_UP, "instance", how="min"),
        ages("Age of the figures from Redis", m.REDIS_READ_AT, "handler"),
        levels("Scraped targets by version", m.BUILD_INFO, "version", "python", "engine", how="count"),
    ]


def services() -> Dashboard:
    """The router, `serve`, masters, and leases of streams."""
    rows = {
        "Router": [
            levels("Subscriptions", m.ROUTER_SUBSCRIPTIONS, "instance"),
            levels("Streams with a subscription", m.ROUTER_STREAMS, "instance"),
            levels("Bytes buffered", m.ROUTER_BUFFERED_BYTES, "instance"),
            levels("At its budget", m.ROUTER_AT_BUDGET, "instance", how="max"),
            increases("Gaps, by reason", m.ROUTER_GAPS, "reason"),
            increases("Messages dropped for slow subscribers", m.ROUTER_DROPPED, "instance"),
            rates("Streams changed a second", m.ROUTER_CHANGED, "instance"),
            rates("Streams polled a second", m.ROUTER_POLLED, "instance"),
        ],
        "Gateway: millstream serve": [
            levels("Connections, by kind", m.SERVE_CONNECTIONS, "kind"),
            rates("Sent a second, by kind", m.SERVE_SENT, "kind"),
            increases("Messages dropped for slow clients", m.SERVE_DROPPED, "kind"),
            increases("Connections ended, by reason", m.SERVE_ENDED, "reason"),
            increases("Connections refused, by status", m.SERVE_REFUSED, "status"),
            increases("Connections closed before a request", m.HTTP_DROPPED, "reason"),
        ],
        "Master": [
            levels("Consumers, by state", m.CONSUMERS, "handler", "state", how="max"),
            rates("Done a second", m.COMMITTED, "handler"),
            increases("Retries", m.RETRIED, "handler"),
            increases("Dead letters, by reason", m.DEAD_LETTERED, "handler", "reason"),
            increases("Claimed", m.CLAIMED, "handler"),
            increases("Commits refused", m.REFUSED, "handler"),
        ],
        "Leases of streams": [
            levels("Streams: total, share, held", m.LEASE_STREAMS, "service", "state", "instance", how="max"),
            increases("Assigned", m.LEASES_ASSIGNED, "service"),
            increases("Ended, by how", m.LEASES_ENDED, "service", "how"),
            increases("Expirations of lost owners found", m.LEASE_EXPIRATIONS, "service"),
            quantiles("Held for", m.LEASE_HELD_SECONDS, "service"),
            quantiles("Heartbeat", m.LEASE_HEARTBEAT_SECONDS, "service"),
            quantiles("From expiry to detection", m.LEASE_RECOVERY_SECONDS, "service"),
            increases("Claims of the program, by outcome", m.LEASE_CLAIMS, "service", "outcome"),
            quantiles("Claim of the program", m.LEASE_CLAIM_SECONDS, "service"),
            increases("Notifications, by kind", m.LEASE_NOTIFICATIONS, "service", "notice"),
        ],
    }
    filters = {"handler": m.CONSUMERS, "service": m.LEASE_STREAMS}
    text = "The router, millstream serve, masters and their consumers, and leases of whole streams."
    return Dashboard(
        name="services",
        title="millstream: services",
        text=text,
        rows=rows,
        filters=filters,
        only_listed=frozenset({"handler"}),  # those of masters, and not of workers
    )


def spark() -> Dashboard:
    """Queries of `millstream run`, and of Spark programs with a listener."""
    total = highest(m.SPARK_BEHIND, matched='of="sum"')
    streams = f"topk(20, {grouped('max', m.SPARK_STREAM_BEHIND, ('query', 'stream'), selected(m.SPARK_STREAM_BEHIND))})"
    rows = {
        "Now": [
            number("Rows a second", m.SPARK_ROWS, f"sum(rate({selected(m.SPARK_ROWS)}[$__rate_interval]))", width=8),
            number("Furthest behind, of the queries", m.SPARK_BEHIND, total, width=8),
            number("Queries", m.SPARK_ROWS, f"count(count by (query) ({selected(m.SPARK_ROWS)}))", width=8),
        ],
        "Queries": [
            rates("Rows a second", m.SPARK_ROWS, "query"),
            quantiles("Batch", m.SPARK_BATCH_SECONDS, "query"),
            levels("Behind, all streams", m.SPARK_BEHIND, "query", how="max", matched='of="sum"'),
            levels("Behind, by stream: min, avg, max", m.SPARK_BEHIND, "query", "of", how="max", matched='of!="sum"'),
            Panel(
                title="The streams furthest behind",
                queries=[(streams, "{{query}} {{stream}}")],
                unit="short",
                text=m.SPARK_STREAM_BEHIND.help,
                width=16,
            ),
        ],
    }
    text = "Batches and backlog of each query. Handlers on Spark are also on the dashboard of handlers."
    return Dashboard(name="spark", title="millstream: Spark", text=text, rows=rows, filters={"query": m.SPARK_ROWS})


def dashboards() -> list[Dashboard]:
    """All of them."""
    return [handlers(), services(), spark()]


def files() -> dict[str, str]:
    """The text of each file, by its name."""
    return {f"{one.name}.json": json.dumps(_document(one), indent=2) + "\n" for one in dashboards()}


def _document(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": f"millstream-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["millstream"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["millstream"], "title": "millstream", "asDropdown": True}],
        "templating": {"list": [_datasource(), *_filters(dashboard)]},
        "panels": list(_panels(dashboard)),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}


def _filters(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    for label, metric in dashboard.filters.items():
        everything = {} if label in dashboard.only_listed else {"allValue": ".*"}
        yield _filter(label, f"label_values({metric.name}, {label})") | everything


def _filter(label: str, query: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Rows and their panels, from left to right and from top to bottom."""
    number_, y = 1, 0
    for title, panels in dashboard.rows.items():
        yield {"id": number_, "type": "row", "title": title, "collapsed": False, "panels": []} | _place(0, y, WIDTH, 1)
        number_, y, x, height = number_ + 1, y + 1, 0, 0
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            own = 4 if panel.kind == "stat" else 7
            yield {"id": number_} | _panel(panel) | _place(x, y, panel.width, own)
            number_, x, height = number_ + 1, x + panel.width, max(height, own)
        y += height


def _place(x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_from is not None:
        steps.append({"color": "red", "value": panel.red_from})
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 5, "showPoints": "never", "spanNulls": False}
        options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}}
        options["tooltip"] = {"mode": "multi", "sort": "desc"}
    else:
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + position), "datasource": DATASOURCE, "expr": query, "legendFormat": shown}
            for position, (query, shown) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
    sys.stdout.write(f"{FOLDER} is written\n")
