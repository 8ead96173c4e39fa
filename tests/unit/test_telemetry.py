"""Traces, with the real OpenTelemetry SDK: from the producer to each run of the handler, and nothing without it."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from millstream.handlers.decoding import compile_decoder
from millstream.model import Message
from millstream.observability.tracing import MOST_FAILED_ATTEMPTS, NO_TRACING, RETRY, Tracing, tracing
from tests.support.calls import calls_of
from tests.support.spans import exported_spans
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.worker, pytest.mark.spark]

TRACEPARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Order:
    """A model."""

    amount: int


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    with exported_spans(monkeypatch) as found:
        yield found


def message(*pairs: bytes, attempt: int = 1, entry_id: str = "5-1") -> Message:
    return Message(stream="orders", id=entry_id, pairs=(b"a", b"1", *pairs), attempt=attempt)


def links_of(span: ReadableSpan) -> list[tuple[int, int]]:
    """The spans that a span is linked to, each with the number of the attempt that it was."""
    return [(link.context.span_id, (link.attributes or {})["millstream.attempt"]) for link in span.links]  # type: ignore[misc]


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = spans.get_finished_spans()
    return span


def test_a_run_of_the_handler_continues_the_trace_of_the_publish(spans: InMemorySpanExporter) -> None:
    traced = tracing()
    with traced.publish_span("orders", 3):
        fields = traced.trace_fields()
    with traced.process_span("shop.total", message(*fields)):
        pass
    publish, run = spans.get_finished_spans()
    assert (publish.kind, run.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert run.parent is not None
    assert run.context.trace_id == publish.context.trace_id
    assert run.parent.span_id == publish.context.span_id
    assert (publish.name, run.name) == ("publish", "process shop.total")
    assert dict(publish.attributes or {}) == {
        "messaging.system": "redis",
        "messaging.operation.type": "send",
        "messaging.operation.name": "publish",
        "messaging.destination.name": "orders",
        "messaging.batch.message_count": 3,
    }
    assert dict(run.attributes or {}) == {
        "messaging.system": "redis",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "millstream:shop.total",
        "messaging.message.id": "5-1",
        "millstream.attempt": 1,
    }


def test_each_attempt_is_a_span_of_the_same_trace_and_a_failed_one_says_why(spans: InMemorySpanExporter) -> None:
    traced = tracing()
    pairs = (b"millstream.traceparent", TRACEPARENT)
    with traced.process_span("shop.total", message(*pairs)) as run:
        run.failed("failed", "ValueError: no")
    with traced.process_span("shop.total", message(*pairs, attempt=2)):
        pass
    first, second = spans.get_finished_spans()
    assert {f"{span.context.trace_id:x}" for span in (first, second)} == {"af7651916cd43dd8448eb211c80319c"}
    assert (first.status.status_code, first.status.description) == (StatusCode.ERROR, "ValueError: no")
    assert (first.attributes or {})["error.type"] == "failed"
    assert second.status.status_code is StatusCode.UNSET
    assert (second.attributes or {})["millstream.attempt"] == 2


def test_the_handlers_own_spans_and_its_outputs_belong_to_the_run(spans: InMemorySpanExporter) -> None:
    traced = tracing()
    with traced.process_span("shop.total", message()):
        with trace.get_tracer("user").start_as_current_span("own"):
            pass
        output = traced.trace_fields()
    with traced.process_span("shop.next", message(*output)):
        pass
    own, run, following = spans.get_finished_spans()
    assert own.parent is not None
    assert following.parent is not None
    assert own.parent.span_id == following.parent.span_id == run.context.span_id


def test_a_run_of_several_messages_is_linked_to_their_traces(spans: InMemorySpanExporter) -> None:
    other = TRACEPARENT.replace(b"0af7", b"0bf7")
    messages = [message(b"millstream.traceparent", each) for each in (TRACEPARENT, other)]
    with tracing().process_span("shop.total", *messages, message()):
        pass
    run = only(spans)
    assert run.parent is None
    assert [f"{link.context.trace_id:032x}".encode() for link in run.links] == [TRACEPARENT[3:35], other[3:35]]
    assert (run.attributes or {})["messaging.batch.message_count"] == 3


def test_each_attempt_is_linked_to_the_failed_one_before_it(spans: InMemorySpanExporter) -> None:
    traced = tracing()
    for attempt in (1, 2, 3):
        with traced.process_span("shop.total", message(attempt=attempt)) as run:
            run.failed(RETRY, "ValueError: no")
    with traced.process_span("shop.total", message(attempt=2, entry_id="6-1")):
        pass
    first, second, third, other = spans.get_finished_spans()
    assert links_of(first) == links_of(other) == []
    assert links_of(second) == [(first.context.span_id, 1)]
    assert links_of(third) == [(second.context.span_id, 2)]


def test_attempts_after_a_failed_run_of_several_messages_are_linked_to_it_once(spans: InMemorySpanExporter) -> None:
    traced = tracing()
    with traced.process_span("shop.total", *(message(entry_id=f"{n}-1") for n in range(4))) as run:
        run.failed(RETRY, "ValueError: no")
    with traced.process_span("shop.total", *(message(entry_id=f"{n}-1", attempt=2) for n in range(3))):
        pass
    with traced.process_span("shop.total", message(entry_id="3-1", attempt=2)):
        pass
    batch, rest, alone = spans.get_finished_spans()
    assert links_of(batch) == []
    assert links_of(rest) == links_of(alone) == [(batch.context.span_id, 1)]


def test_a_message_that_became_a_dead_letter_leaves_no_failed_attempt_to_link_to(spans: InMemorySpanExporter) -> None:
    traced = tracing()
    with traced.process_span("shop.total", message()) as run:
        run.failed("failed", "ValueError: no")
    with traced.process_span("shop.total", message(attempt=2)):
        pass
    assert [links_of(span) for span in spans.get_finished_spans()] == [[], []]


def test_the_newest_failed_attempts_are_remembered_for_links_and_no_more(spans: InMemorySpanExporter) -> None:
    traced = tracing()
    ids = [f"{n}-1" for n in range(MOST_FAILED_ATTEMPTS + 1)]
    with traced.process_span("shop.total", *(message(entry_id=each) for each in ids)) as run:
        run.failed(RETRY, "ValueError: no")
    for each in (ids[0], ids[1], ids[-1]):
        with traced.process_span("shop.total", message(entry_id=each, attempt=2)):
            pass
    batch, *runs = spans.get_finished_spans()
    assert [links_of(run) for run in runs] == [[], [(batch.context.span_id, 1)], [(batch.context.span_id, 1)]]


@pytest.mark.parametrize("value", [b"", b"rubbish", b"\xff\x00", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"])
def test_a_field_that_is_no_trace_starts_a_new_one(spans: InMemorySpanExporter, value: bytes) -> None:
    with tracing().process_span("shop.total", message(b"millstream.traceparent", value)):
        pass
    assert only(spans).parent is None


@pytest.mark.parametrize("messages", [1, 2])
def test_messages_without_a_trace_do_not_join_the_trace_of_the_engine(
    spans: InMemorySpanExporter, messages: int
) -> None:
    given = [message()] * messages
    with trace.get_tracer("engine").start_as_current_span("loop"), tracing().process_span("shop.total", *given):
        pass
    run, loop = spans.get_finished_spans()
    assert run.parent is None
    assert run.context.trace_id != loop.context.trace_id


def test_the_state_of_a_trace_is_propagated_too(spans: InMemorySpanExporter) -> None:
    traced = tracing()
    pairs = (b"millstream.traceparent", TRACEPARENT, b"millstream.tracestate", b"vendor=1")
    with traced.process_span("shop.total", message(*pairs)):
        fields = traced.trace_fields()
    assert fields[::2] == pairs[::2]
    assert fields[3] == b"vendor=1"
    assert fields[1][:35] == TRACEPARENT[:35]


def test_a_raising_block_is_recorded_and_raises(spans: InMemorySpanExporter) -> None:
    traced = tracing()
    with pytest.raises(LookupError), traced.publish_span("orders", 1):
        raise LookupError("no")
    assert only(spans).status.status_code is StatusCode.ERROR


def test_a_typed_model_does_not_see_the_trace() -> None:
    pairs = (b"millstream.traceparent", TRACEPARENT, b"amount", b"7", b"millstream.tracestate", b"vendor=1")
    assert compile_decoder(Order)(pairs) == Order(amount=7)


def test_the_trace_of_an_output_replaces_one_that_the_handler_copied(spans: InMemorySpanExporter) -> None:
    traced = tracing()
    with traced.publish_span("orders", 1):
        fields = traced.trace_fields()
    with traced.process_span("shop.next", message(b"millstream.traceparent", TRACEPARENT, *fields)):
        pass
    publish, run = spans.get_finished_spans()
    assert run.context.trace_id == publish.context.trace_id


def use(traced: Tracing) -> object:
    """What an engine does for one message."""
    with traced.process_span("shop.total", MESSAGE) as run:
        run.failed("failed", "no")
        return traced.trace_fields()


MESSAGE = message(b"millstream.traceparent", TRACEPARENT)


def test_without_an_sdk_nothing_is_traced_at_hardly_any_cost() -> None:
    assert tracing() is NO_TRACING
    assert use(NO_TRACING) == ()
    with NO_TRACING.publish_span("orders", 1):
        assert NO_TRACING.trace_fields() == ()
    assert calls_of(lambda: use(NO_TRACING)) == [
        "use",
        "process_span",
        "__enter__",
        "failed",
        "trace_fields",
        "__exit__",
    ]


def test_without_the_library_nothing_is_traced() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from millstream.observability.tracing import NO_TRACING, tracing\n"
        "assert tracing() is NO_TRACING\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=FAIL_SAFE_S)


def test_the_library_is_not_loaded_before_it_is_asked_for() -> None:
    program = "import sys, millstream.observability.tracing; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=FAIL_SAFE_S)
