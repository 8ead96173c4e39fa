"""Tracing: OpenTelemetry traces from the producer to the handler, if that library is installed and set up.

The trace context travels in the entry itself, in fields with reserved names, in the format of W3C Trace Context. The
fields stay in the entry: models ignore them, and a dead letter keeps them and so continues its trace when redriven.
Span names and attributes follow OpenTelemetry's semantic conventions for messaging.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from millstream.model import Message
from millstream.redis_client.key_names import PREFIX

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer

_FIELDS = {f"{PREFIX}.{name}".encode(): name for name in ("traceparent", "tracestate")}
"""Reserved fields, and their names in W3C Trace Context."""

RETRY = "retry"
"""The kind of a failure after which the messages of the run get another attempt."""

MOST_FAILED_ATTEMPTS = 10_000
"""Messages whose last failed attempt is remembered for a link; of more, the newest."""


class TracedRun:
    """One run of a handler in progress."""

    def failed(self, kind: str, text: str) -> None:
        """Record a failure. `kind` is one word of a small set, RETRY among them; `text` describes the error."""


class Tracing:
    """Receives the spans of an engine. This base class discards them at almost no cost; see `tracing`."""

    def publish_span(self, stream: str, count: int) -> AbstractContextManager[None]:
        """The span of one publish of `count` entries to `stream`; add `trace_fields()` to each of them."""
        return _NO_SPAN

    def process_span(self, handler: str, *messages: Message) -> AbstractContextManager[TracedRun]:
        """The span of one run of `handler` (`app.name`); enter it around the call of the handler.

        It continues the trace of its message. A run of several messages starts a new trace with links to theirs.
        Another attempt has a link to the failed one before it, if that ran in this process.
        """
        return _UNTRACED_RUN

    def trace_fields(self) -> tuple[bytes, ...]:
        """Field names and values that carry the current trace; append them to an entry that is written."""
        return ()


_NO_SPAN = nullcontext()
_UNTRACED_RUN = nullcontext(TracedRun())
NO_TRACING = Tracing()
"""Discards all spans."""


def tracing() -> Tracing:
    """The Tracing of the program's OpenTelemetry SDK; `NO_TRACING` without one.

    Call it once, after the program has set its tracer provider.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        return NO_TRACING
    # Without an SDK the API would create spans that are never exported, at a cost for each message.
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return NO_TRACING
    return _OpenTelemetry(trace.get_tracer("millstream"))


class _FailedAttempts:
    """The spans of attempts that failed and are to be repeated, by message, until the next attempt begins here.

    A message that another process repeats leaves its span, so their number is limited.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # several threads run handlers
        self._found: dict[tuple[str, str], tuple[SpanContext, int]] = {}

    def add(self, messages: Sequence[Message], span: "SpanContext") -> None:
        """Remember the failed attempt of these messages."""
        with self._lock:
            for message in messages:
                self._found[message.stream, message.id] = span, message.attempt
            while len(self._found) > MOST_FAILED_ATTEMPTS:
                del self._found[next(iter(self._found))]

    def pop(self, messages: Sequence[Message]) -> Sequence[tuple["SpanContext", int]]:
        """Return the failed attempts of these messages, each once, with its number, and forget them."""
        repeated = [(message.stream, message.id) for message in messages if message.attempt > 1]
        if not repeated:
            return ()
        with self._lock:
            found = [self._found.pop(each, None) for each in repeated]
        return [*{each[0].span_id: each for each in found if each is not None}.values()]


class _SpanRun(TracedRun):
    def __init__(self, span: "Span") -> None:
        self._span = span
        self.is_repeated = False

    def failed(self, kind: str, text: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self.is_repeated = kind == RETRY
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, text))


class _OpenTelemetry(Tracing):
    def __init__(self, tracer: "Tracer") -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._kinds = SpanKind
        self._w3c = TraceContextTextMapPropagator()
        self._failed_attempts = _FailedAttempts()

    @contextmanager
    def publish_span(self, stream: str, count: int) -> Iterator[None]:
        """A PRODUCER span."""
        attributes = {**_attributes("send", "publish", [stream]), "messaging.batch.message_count": count}
        with self._tracer.start_as_current_span("publish", kind=self._kinds.PRODUCER, attributes=attributes):
            yield

    @contextmanager
    def process_span(self, handler: str, *messages: Message) -> Iterator[TracedRun]:
        """A CONSUMER span, named after the handler: there may be too many streams for span names."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, get_current_span

        attributes = _attributes("process", "process", [message.stream for message in messages])
        attributes["messaging.consumer.group.name"] = f"{PREFIX}:{handler}"
        # Invalid fields are treated like missing ones: both give an empty context.
        origins = [self._w3c.extract(_carrier(message.pairs)) for message in messages]
        parent, links = Context(), []  # empty: the engine's own current span is not the origin of messages
        if len(messages) == 1:
            parent = origins[0]
            attributes["messaging.message.id"] = messages[0].id
            attributes["millstream.attempt"] = messages[0].attempt
        else:
            attributes["messaging.batch.message_count"] = len(messages)
            links = [Link(get_current_span(origin).get_span_context()) for origin in origins]
        links += [
            Link(failed, {"millstream.attempt": attempt}) for failed, attempt in self._failed_attempts.pop(messages)
        ]
        with self._tracer.start_as_current_span(
            f"process {handler}", context=parent, kind=self._kinds.CONSUMER, attributes=attributes, links=links
        ) as span:
            run = _SpanRun(span)
            yield run
        if run.is_repeated:
            self._failed_attempts.add(messages, span.get_span_context())

    def trace_fields(self) -> tuple[bytes, ...]:
        """The fields that carry the current span."""
        carrier: dict[str, str] = {}
        self._w3c.inject(carrier)
        return tuple(
            item for field, name in _FIELDS.items() if name in carrier for item in (field, carrier[name].encode())
        )


def _carrier(pairs: Sequence[bytes]) -> dict[str, str]:
    return {_FIELDS[pairs[i]]: pairs[i + 1].decode("latin-1") for i in range(0, len(pairs), 2) if pairs[i] in _FIELDS}


def _attributes(kind: str, name: str, streams: list[str]) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "messaging.system": "redis",
        "messaging.operation.type": kind,
        "messaging.operation.name": name,
    }
    if len(set(streams)) == 1:
        attributes["messaging.destination.name"] = streams[0]
    return attributes
