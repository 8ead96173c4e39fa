"""Metrics: one catalogue, cheap without a recorder, right in Prometheus, and described as they are."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from millstream.errors import ConfigError
from millstream.handlers.dead_letter import Reason
from millstream.observability import metrics
from millstream.observability.metrics import CATALOGUE, NO_METRICS, Metric, Metrics, Recorder
from millstream.worker import loop_metrics as report_module
from millstream.worker.loop_metrics import LoopMetrics
from tests.support.calls import calls_of

pytestmark = [pytest.mark.worker]

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"
SOURCE = Path(metrics.__file__).parents[1]


def exported(recorder: Recorder) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What Prometheus reads: sample name and labels -> value."""
    registry = CollectorRegistry()
    registry.register(recorder)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def report(recorder: Metrics, metric: Metric) -> None:
    """Report one figure of whatever kind, with a value for each label."""
    labels = dict.fromkeys(metric.labels, "x")
    if metric.kind == "counter":
        recorder.count(metric, 2, **labels)
    elif metric.kind == "gauge":
        recorder.set(metric, 2, **labels)
    else:
        recorder.observe(metric, 2, **labels)


def table() -> str:
    """The table of docs/metrics.md."""
    lines = ["| name | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in CATALOGUE:
        labels = " ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_every_metric_is_named_by_the_rules_and_reaches_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"millstream_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.name.endswith("_seconds") == (metric.unit in ("seconds", "unix time"))
    if metric is not metrics.SPARK_STREAM_BEHIND:  # its reporter forgets all but a few streams
        assert not {"key", "stream", "id"} & set(metric.labels), "there may be millions of them"
    recorder = Recorder()
    report(recorder, metric)
    labels = frozenset((label, "x") for label in metric.labels)
    name, value = (f"{metric.name}_sum", 2) if metric.kind == "histogram" else (metric.name, 2)
    assert exported(recorder)[name, labels] == value


def test_no_name_stands_twice_in_the_catalogue() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)


def test_every_metric_of_the_module_is_in_the_catalogue() -> None:
    assert [value for value in vars(metrics).values() if isinstance(value, Metric)] == CATALOGUE


def test_every_metric_is_reported_by_a_module() -> None:
    names = {id(value): name for name, value in vars(metrics).items() if isinstance(value, Metric)}
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "metrics.py")
    reported = set(re.findall(r"\.(?:count|set|observe|observe_all)\(\s*(?:m|metrics)\.([A-Z_]+)", text))
    assert set(names.values()) == reported


def test_a_new_reading_loop_shows_each_of_its_counters_at_zero() -> None:
    """A counter that appears with its first event was never lower, so `increase` never sees that event."""
    recorder = Recorder()
    LoopMetrics("a.b", time_limit_ms=1_000, metrics=recorder)
    figures = exported(recorder)
    handler = ("handler", "a.b")
    for reason in get_args(Reason):
        assert figures["millstream_messages_dead_lettered_total", frozenset({handler, ("reason", reason)})] == 0
    shown = {name for name, _ in figures}
    counted = re.findall(r"\.count\(m\.([A-Z_]+)", Path(report_module.__file__).read_text())
    assert len(counted) > 10, "the expression finds them no more"
    for name in counted:
        assert getattr(metrics, name).name in shown, f"{name} is counted, and not there before"
    assert all(value == 0 for (name, _), value in figures.items() if name.endswith("_total"))


def test_a_histogram_counts_a_value_in_its_bucket_and_all_above() -> None:
    recorder = Recorder()
    recorder.observe_all(metrics.COMMIT_SECONDS, [0.001, 0.0011, 99.0], handler="a.b")
    figures = exported(recorder)
    below = {
        dict(labels)["le"]: value
        for (name, labels), value in figures.items()
        if name == "millstream_commit_seconds_bucket"
    }
    assert (below["0.0005"], below["0.001"], below["0.0025"], below["10.0"], below["+Inf"]) == (0, 1, 2, 2, 3)
    assert figures["millstream_commit_seconds_count", frozenset({("handler", "a.b")})] == 3
    assert recorder.value(metrics.COMMIT_SECONDS, handler="a.b") == 3


def test_counters_add_up_and_gauges_change_for_each_label_separately() -> None:
    recorder = Recorder()
    recorder.count(metrics.DEAD_LETTERED, handler="a.b", reason="failed")
    recorder.count(metrics.DEAD_LETTERED, 4, reason="failed", handler="a.b")
    recorder.count(metrics.DEAD_LETTERED, handler="a.b", reason="rejected")
    recorder.set(metrics.PAUSED, 1, handler="a.b")
    recorder.set(metrics.PAUSED, 0, handler="a.b")
    assert recorder.value(metrics.DEAD_LETTERED, handler="a.b", reason="failed") == 5
    assert recorder.value(metrics.DEAD_LETTERED, handler="a.b", reason="rejected") == 1
    assert recorder.value(metrics.DEAD_LETTERED, handler="a.c", reason="failed") == 0
    assert recorder.value(metrics.PAUSED, handler="a.b") == 0


def test_a_removed_series_is_not_exported_any_more() -> None:
    recorder = Recorder()
    for stream in "ab":
        recorder.set(metrics.SPARK_STREAM_BEHIND, 3, query="q", stream=stream)
    recorder.remove(metrics.SPARK_STREAM_BEHIND, query="q", stream="a")
    recorder.remove(metrics.SPARK_STREAM_BEHIND, query="q", stream="never set")
    assert [dict(labels)["stream"] for _, labels in exported(recorder)] == ["b"]


def test_labels_of_any_characters_are_exported_unchanged() -> None:
    recorder = Recorder()
    text = 'a"b\\c\nd é'
    recorder.count(metrics.READ, handler=text)
    assert exported(recorder)["millstream_messages_read_total", frozenset({("handler", text)})] == 1


def test_threads_lose_no_count() -> None:
    recorder = Recorder()

    def work() -> None:
        for _ in range(20_000):
            recorder.count(metrics.READ, handler="a.b")
            recorder.observe(metrics.AGE_SECONDS, 0.01, handler="a.b")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        list(recorder.collect())
    for thread in threads:
        thread.join()
    assert recorder.value(metrics.READ, handler="a.b") == recorder.value(metrics.AGE_SECONDS, handler="a.b") == 80_000


@pytest.mark.parametrize(
    "mistake",
    [
        lambda recorder: recorder.count(metrics.READ),
        lambda recorder: recorder.count(metrics.READ, handlr="a.b"),
        lambda recorder: recorder.count(metrics.READ, handler="a.b", stream="s"),
        lambda recorder: recorder.count(metrics.LAG, handler="a.b"),
        lambda recorder: recorder.set(metrics.READ, 1, handler="a.b"),
        lambda recorder: recorder.observe(metrics.READ, 1, handler="a.b"),
    ],
)
def test_a_wrong_label_or_kind_is_an_error_with_a_recorder(mistake: Callable[[Metrics], None]) -> None:
    mistake(NO_METRICS)
    with pytest.raises(ConfigError, match="millstream_"):
        mistake(Recorder())


def test_a_metric_costs_no_more_than_a_call_without_a_recorder() -> None:
    assert calls_of(lambda: NO_METRICS.count(metrics.READ, 10, handler="a.b")) == ["count"]
    assert calls_of(lambda: NO_METRICS.observe(metrics.HANDLER_SECONDS, 0.1, handler="a.b")) == ["observe"]
    assert calls_of(lambda: NO_METRICS.set(metrics.LAG, 3, handler="a.b")) == ["set"]


def test_the_document_has_the_catalogue_and_names_no_other_metric() -> None:
    text = DOCUMENT.read_text()
    assert table() in text, f"put this into {DOCUMENT.name}:\n{table()}"
    samples = {f"{metric.name}{end}" for metric in CATALOGUE for end in ("", "_bucket", "_count", "_sum")}
    assert set(re.findall(r"\bmillstream_[a-z_]+", text)) <= samples
