"""Writes deploy/prometheus/rules.yaml: alerts for Prometheus, from the catalogue of metrics.

    python -m scripts.alert_rules

`tests/unit/test_alerts.py` compares the file with this program. Each expression is made of metrics of the catalogue and
of labels that they have; a label that one lacks is an error here.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millstream.observability import metrics as m
from millstream.observability.merged_metrics import LABEL as WORKER
from millstream.observability.metrics import Metric
from scripts.grafana_dashboards import grouped

FILE = Path(__file__).parents[1] / "deploy/prometheus/rules.yaml"
RUNBOOK = "https://docs.example/operations/runbook.html"
HEAD = """\
# Alerts for Prometheus: `rule_files: [rules.yaml]`. docs/operations/production.md has them as a table.
# `python -m scripts.alert_rules` writes this file from the catalogue of metrics.
# https://docs.example is a placeholder: replace it with the address of your copy of the pages, which `make docs` builds.
# The page shows a command for that: docs/operations/production.md, "Set the address of the runbook".
groups:
  - name: millstream
    rules:
"""
HANDLER = "{{ $labels.handler }}"
DURATION = "{{ $value | humanizeDuration }}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One alert.

    * `expression`: fires while it has been true for `minutes`
    * `summary`: one sentence for the person on call, with labels that the result of the expression has
    * `section`: the section of the runbook, by its anchor
    """

    alert: str
    expression: str
    minutes: int
    severity: Literal["warning", "critical"]
    summary: str
    section: str


def series(metric: Metric, **matchers: str) -> str:
    """The series of a metric with these labels, such as `state='="parked"'`. Raises ValueError for one that it lacks."""
    if wrong := set(matchers) - set(metric.labels):
        raise ValueError(f"{metric.name} has no label {', '.join(sorted(wrong))}")
    chosen = ", ".join(f"{label}{matcher}" for label, matcher in matchers.items())
    return f"{metric.name}{{{chosen}}}" if chosen else metric.name


def highest(metric: Metric, *labels: str, **matchers: str) -> str:
    """A figure from Redis: each process exports the same value."""
    return grouped("max", metric, labels, series(metric, **matchers))


def since(metric: Metric) -> str:
    """The seconds that have passed since a gauge's time."""
    return f"time() - {series(metric)}"


def rules() -> Sequence[Rule]:
    """All alerts, in the order of the file."""
    return (*messages(), *keys(), *processes())


def messages() -> Sequence[Rule]:
    """Dead letters, lost messages, and messages that wait."""
    letters = grouped("sum", m.DEAD_LETTERS, ("handler",), highest(m.DEAD_LETTERS, "handler", "reason"))
    lost = grouped("sum", m.TRIMMED, ("handler",), f"increase({series(m.TRIMMED)}[1h])")
    return (
        Rule(
            alert="MillstreamDeadLetters",
            expression=f"{letters} > 0",
            minutes=1,
            severity="warning",
            summary=f"{HANDLER} has {{{{ $value }}}} dead letters",
            section="there-are-dead-letters",
        ),
        Rule(
            alert="MillstreamMessagesLost",
            expression=f"{lost} > 0",
            minutes=0,
            severity="critical",
            summary=f"pending messages of {HANDLER} were trimmed from their stream",
            section="messages-were-trimmed",
        ),
        Rule(
            alert="MillstreamHandlerPausedItself",
            expression=f"{highest(m.BREAKER_OPEN, 'handler')} == 1",
            minutes=0,
            severity="critical",
            summary=f"the breaker has paused {HANDLER}: nearly all its messages became dead letters",
            section="all-messages-become-dead-letters",
        ),
        Rule(
            alert="MillstreamMessageWaits",
            expression=f"{highest(m.OLDEST_MESSAGE, 'handler')} > 300",
            minutes=10,
            severity="warning",
            summary=f"the oldest message of {HANDLER} waits for {DURATION}",
            section="the-lag-grows",
        ),
    )


def keys() -> Sequence[Rule]:
    """Keys that block their own messages, or soon all others."""
    waits = highest(m.OLDEST_KEY, "handler", "state", state='=~"backing_off|leased"')
    return (
        Rule(
            alert="MillstreamKeyParked",
            expression=f"""{highest(m.KEYS, "handler", state='="parked"')} > 0""",
            minutes=5,
            severity="warning",
            summary=f"{{{{ $value }}}} keys of {HANDLER} are parked until an operator acts",
            section="1-parked-after-its-last-attempt",
        ),
        Rule(
            alert="MillstreamKeyWaits",
            expression=f"{waits} > 600",
            minutes=5,
            severity="warning",
            summary=f"a key of {HANDLER} has been {{{{ $labels.state }}}} for {DURATION}",
            section="a-key-is-stuck",
        ),
        Rule(
            alert="MillstreamLookAheadUsed",
            expression=f"{highest(m.LOOK_AHEAD_USED, 'handler')} > 0.8",
            minutes=5,
            severity="critical",
            summary=f"waiting keys of {HANDLER} soon block all its other keys",
            section="no-key-is-stuck-yet-a-handler-makes-no-progress",
        ),
    )


def processes() -> Sequence[Rule]:
    """Processes that hang or end, and figures without which the others do not fire."""
    unknown = f"{series(m.REDIS_UP)} == 0 or {since(m.REDIS_READ_AT)} > 600"
    return (
        Rule(
            alert="MillstreamWorkerHangs",
            expression=f"{since(m.LAST_POLL)} > 60",
            minutes=2,
            severity="critical",
            summary=f"a worker of {HANDLER} has had no answer of Redis for {DURATION}",
            section="a-worker-hangs-or-redis-is-unavailable",
        ),
        Rule(
            alert="MillstreamWorkersDie",
            expression=f"increase({series(m.WORKER_RESTARTS)}[10m]) > 2",
            minutes=0,
            severity="warning",
            summary=f"the worker process {{{{ $labels.{WORKER} }}}} was started again {{{{ $value | humanize }}}} times "
            "in ten minutes",
            section="a-worker-was-killed",
        ),
        Rule(
            alert="MillstreamFiguresMissing",
            expression=unknown,
            minutes=2,
            severity="critical",
            summary="{{ $labels.instance }} cannot read the figures of Redis, or they are old: the alerts above may not fire",
            section="a-worker-hangs-or-redis-is-unavailable",
        ),
    )


def text() -> str:
    """The file."""
    return HEAD + "".join(
        f"      - alert: {one.alert}\n"
        f"        expr: {one.expression}\n"
        f"        for: {one.minutes}m\n"
        f"        labels: {{severity: {one.severity}}}\n"
        "        annotations:\n"
        f"          summary: {json.dumps(one.summary)}\n"
        f"          runbook_url: {RUNBOOK}#{one.section}\n"
        for one in rules()
    )


if __name__ == "__main__":
    FILE.write_text(text())
    sys.stdout.write(f"{FILE} is written\n")
