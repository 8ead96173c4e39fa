"""OpenTelemetry traces from the producer to the handler, where that library is installed and set up.

The trace travels in the entry itself, in fields with a reserved name, as W3C Trace Context has it. They stay where
they are: models ignore them, and a dead letter that keeps them continues its trace when it is redriven. Span names
and attributes follow OpenTelemetry's semantic conventions for messaging.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from millstream.model import Message
from millstream.redis_client.key_names import PREFIX

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_FIELDS = {f"{PREFIX}.{name}".encode(): name for name in ("traceparent", "tracestate")}
"""Reserved fields, and what W3C calls them."""


class TracedRun:
    """One run of a handler, under way."""

    def failed(self, kind: str, text: str) -> None:
        """It did not succeed. `kind` is one word of a few, `text` says what happened."""


class Tracing:
    """What an engine tells of its work. This one tells nobody and costs next to nothing; see `tracing`."""

    def publishing(self, stream: str, count: int) -> AbstractContextManager[None]:
        """The span of one publish of `count` entries to `stream`; put `fields()` into each of them."""
        return _NOTHING

    def processing(self, handler: str, *messages: Message) -> AbstractContextManager[TracedRun]:
        """The span of one run of `handler` (`app.name`), to be entered where the handler is called.

        It continues the trace of its message. A run of several has a trace of its own with links to theirs.
        """
        return _UNSEEN_RUN

    def fields(self) -> tuple[bytes, ...]:
        """Names and values that carry the current trace: to be appended to an entry that is written."""
        return ()


_NOTHING = nullcontext()
_UNSEEN_RUN = nullcontext(TracedRun())
UNTRACED = Tracing()
"""Traces go nowhere."""


def tracing() -> Tracing:
    """Return what traces with the program's OpenTelemetry SDK; `UNTRACED` if there is none.

    Ask once, when the program has set its tracer provider.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        return UNTRACED
    # Without an SDK the API would make spans that nobody ever sees, at a price for each message.
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return UNTRACED
    return _OpenTelemetry(trace.get_tracer("millstream"))


class _SpanRun(TracedRun):
    def __init__(self, span: "Span") -> None:
        self._span = span

    def failed(self, kind: str, text: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, text))


class _OpenTelemetry(Tracing):
    def __init__(self, tracer: "Tracer") -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._kinds = SpanKind
        self._w3c = TraceContextTextMapPropagator()

    @contextmanager
    def publishing(self, stream: str, count: int) -> Iterator[None]:
        """A PRODUCER span."""
        attributes = {**_attributes("send", "publish", [stream]), "messaging.batch.message_count": count}
        with self._tracer.start_as_current_span("publish", kind=self._kinds.PRODUCER, attributes=attributes):
            yield

    @contextmanager
    def processing(self, handler: str, *messages: Message) -> Iterator[TracedRun]:
        """A CONSUMER span, named after the handler: there may be too many streams for names of spans."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, get_current_span

        attributes = _attributes("process", "process", [message.stream for message in messages])
        attributes["messaging.consumer.group.name"] = f"{PREFIX}:{handler}"
        # Fields that hold no trace are those of a producer without one: both give an empty context.
        origins = [self._w3c.extract(_carrier(message.pairs)) for message in messages]
        parent, links = Context(), []  # empty: what the engine does at the moment is not where messages come from
        if len(messages) == 1:
            parent = origins[0]
            attributes["messaging.message.id"] = messages[0].id
            attributes["millstream.attempt"] = messages[0].attempt
        else:
            attributes["messaging.batch.message_count"] = len(messages)
            links = [Link(get_current_span(origin).get_span_context()) for origin in origins]
        with self._tracer.start_as_current_span(
            f"process {handler}", context=parent, kind=self._kinds.CONSUMER, attributes=attributes, links=links
        ) as span:
            yield _SpanRun(span)

    def fields(self) -> tuple[bytes, ...]:
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
