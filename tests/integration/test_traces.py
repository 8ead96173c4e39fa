"""A trace goes from the publish to each run of the handler, through a real stream."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from millstream import App, Message, Retry
from millstream.observability import metrics as m
from millstream.observability.metrics import Recorder
from millstream.producer.producer import Producer
from millstream.worker import ReadingLoop, WorkerPolicy
from tests.support.spans import exported_spans
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker, pytest.mark.spark]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    with exported_spans(monkeypatch) as found:
        yield found


def test_publish_and_every_attempt_are_one_trace_and_an_attempt_is_linked_to_the_failed_one(
    spans: InMemorySpanExporter, millstream_url: str
) -> None:
    app = App("shop")

    @app.handler("orders", retry=Retry(attempts=2, delay_ms=1))
    def total(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("not yet")

    recorder = Recorder()
    with Producer(millstream_url, metrics=recorder) as producer:
        producer.publish("orders", {"n": 1})
        with trace.get_tracer_provider().get_tracer("user").start_as_current_span("request"):
            asyncio.run(producer.publish_async("orders", {"n": 2}))
    assert recorder.value(m.PUBLISHED) == 2
    loop = ReadingLoop(app.handlers["total"], millstream_url, consumer="w", policy=WorkerPolicy(block_ms=50))
    thread = threading.Thread(target=loop.run)
    thread.start()
    eventually(lambda: loop.loop_metrics.committed == 2)
    loop.stop()
    thread.join()
    by_trace: dict[int, list[str]] = {}
    found = spans.get_finished_spans()
    for span in found:
        by_trace.setdefault(span.context.trace_id, []).append(span.name)
    one = ["process shop.total", "process shop.total", "publish"]
    assert sorted(map(sorted, by_trace.values())) == [one, [*one, "request"]]
    runs = {(span.context.trace_id, (span.attributes or {}).get("millstream.attempt")): span for span in found}
    for trace_id in by_trace:
        (link,) = runs[trace_id, 2].links
        assert link.context.span_id == runs[trace_id, 1].context.span_id


@pytest.mark.parametrize("key", [None, "account"], ids=["without a key", "with a key"])
def test_attempts_of_a_message_on_two_workers_are_one_trace_without_a_link_between_them(
    monkeypatch: pytest.MonkeyPatch, millstream_url: str, key: str | None
) -> None:
    app = App("shop")
    loops: list[ReadingLoop] = []

    @app.handler("orders", key=key, retry=Retry(attempts=2, delay_ms=1_000))
    def total(message: Message) -> None:
        loops[-1].stop()
        if message.attempt == 1:
            raise ValueError("not yet")

    with exported_spans(monkeypatch) as of_publish, Producer(millstream_url) as producer:
        producer.publish("orders", {"account": "ann"})
    exporters = [of_publish]
    for _ in range(2):
        # As in a process of its own: with another SDK, and no memory of failed attempts.
        with exported_spans(monkeypatch) as of_process:
            policy = WorkerPolicy(block_ms=50, sweep_ms=50)
            loops.append(ReadingLoop(app.handlers["total"], millstream_url, consumer="w", policy=policy))
            loops[-1].run()
        exporters.append(of_process)
    publish, first, second = (span for one in exporters for span in one.get_finished_spans())
    assert [loop.loop_metrics.committed for loop in loops] == [0, 1]
    assert {one.context.trace_id for one in (first, second)} == {publish.context.trace_id}
    assert {one.parent and one.parent.span_id for one in (first, second)} == {publish.context.span_id}
    assert [(one.attributes or {}).get("millstream.attempt") for one in (first, second)] == [1, 2]
    assert [*first.links, *second.links] == []
