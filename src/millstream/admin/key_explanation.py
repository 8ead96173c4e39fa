"""KeyExplanation: why the messages of a key wait or not, in words, and the commands that mend it. No I/O.

`millstream why` prints it; whatever else shows a key to operators uses the same words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millstream.admin.delayed_streams import DelayedStream
from millstream.admin.findings import quoted, start_command
from millstream.admin.key_queues import KeyQueue, explain, is_blocked
from millstream.admin.limit_waits import LimitWait, ShowValue, show_value
from millstream.admin.reports import HandlerReport
from millstream.delivery.last_error import LastError
from millstream.delivery.long_runs import LongRun
from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age, pluralize

_HEADS = {
    "leased": "is in progress",
    "ready": "is ready",
    "backing off": "waits",
    "parked": "waits",
    "unreadable": "is unreadable",
}


@dataclass(frozen=True, kw_only=True)
class KeyReport:
    """A key of a handler on one stream, and what decides when its messages run.

    * `handler`: the handler on that stream; `key`: the key
    * `is_only_stream`: the handler has run on no other stream
    * `queue`: its key queue; None if no message of it is queued or in progress, and it is not parked
    * `last`: why the last attempt on its first message failed; `long_run`: the run of that message, if it takes long
    * `limit`: the limit of the handler that its first message waits for; None if it waits for none
    * `is_migrating`: it is parked only until it has left another partition
    * `queued`: messages in all key queues of the handler on the stream, and the most that may be; None if unknown, or
      if that keeps no message of the key
    * `delayed`: the delayed messages of the stream, of any key; None if there are none
    * `dead_letters`: those of the key, the newest first, as far as they are among the newest of the handler
    * `now_ms`: the server's time, in Unix milliseconds
    """

    handler: HandlerReport
    key: bytes
    is_only_stream: bool
    queue: KeyQueue | None
    last: LastError
    long_run: LongRun | None
    limit: LimitWait | None
    is_migrating: bool
    queued: tuple[int, int] | None
    delayed: DelayedStream | None
    dead_letters: Sequence[DeadLetter]
    now_ms: int

    @property
    def is_blocked(self) -> bool:
        """True if its first message has failed all its attempts or waits for newer code, and is retried without end."""
        return self.queue is not None and is_blocked(self.queue, self.last)

    @property
    def attempt(self) -> int | None:
        """The number of the attempt that runs, or comes next, on its first message; None if it has no message."""
        return self.queue.failed_attempts + 1 if self.queue is not None and self.queue.length else None

    @property
    def unread(self) -> int:
        """Entries of the stream that the handler has not read yet, as far as they were counted."""
        return max(0, (self.handler.lag or 0) - self.handler.pending)


@dataclass(frozen=True, kw_only=True)
class KeyExplanation:
    """Why the messages of a key wait or not.

    * `sentences`: the reason, each a whole sentence without its full stop; the first one names the key
    * `mend`: the commands that mend it, each complete; () if there is nothing to do
    """

    sentences: tuple[str, ...]
    mend: tuple[str, ...]

    @property
    def text(self) -> str:
        """All sentences, in one line."""
        return " ".join(f"{one.removesuffix('.')}." for one in self.sentences)


def explain_key(report: KeyReport, show: ShowValue = show_value) -> KeyExplanation:
    """Explain the state of a key, the most decisive reason first."""
    sentences = (*_of_queue(report, show), *_of_handler(report), *_of_dead_letters(report))
    return KeyExplanation(sentences=sentences, mend=tuple(dict.fromkeys(_mend(report))))


def _of_queue(report: KeyReport, show: ShowValue) -> Iterator[str]:
    handler, queue, last = report.handler, report.queue, report.last
    name = f"Key {escape(report.key)} of {handler.label} on {escape(handler.stream)}"
    if queue is None:
        yield f"{name} does not wait: none of its messages is queued or in progress"
        return
    yield f"{name} {_HEADS[queue.state]}: {explain(queue, last)}"
    if queue.state == "leased" and queue.length:
        of = f" of {last.attempts}" if last.attempts and not last.blocks else ""
        yield f"This is attempt {report.attempt}{of} on its first message"
    if report.long_run is not None:
        run = report.long_run
        yield (
            f"That message has been running for {format_age(max(0, report.now_ms - run.started_ms))}; its time limit "
            f"ends it after {format_age(run.time_limit_ms)}"
        )
    if report.limit is not None:
        yield f"It {report.limit.describe(handler.label, show)}"
    if report.is_migrating:
        yield "It goes on by itself when its messages in the earlier partition are done"
    if last.error:
        yield f"The last attempt failed with {last.error}"
    if queue.length > 1:
        behind = pluralize(queue.length - 1, "message waits", "messages wait")
        yield f"{behind} behind its first message {queue.first_id}"
    elif queue.length:
        yield f"Its only message is {queue.first_id}"
    else:
        yield "It has no message now; those to come will wait" if queue.state == "parked" else "It has no message left"


def _of_handler(report: KeyReport) -> Iterator[str]:
    handler = report.handler
    if handler.pause is not None:
        yield f"{handler.label} is {handler.pause.reason}"
    if _reads_at_rate(report) and handler.rate_override is not None:
        yield f"{handler.label} reads at the rate {handler.rate_override.source}"
    if not handler.consumers and (report.queue is not None or report.unread):
        yield f"No worker and no run of {handler.label} is alive"
    if report.queue is None and report.delayed is not None:
        first = format_age(max(0, report.delayed.due_ms - report.now_ms))
        entries = pluralize(report.delayed.count, "delayed message is", "delayed messages are")
        yield f"{entries} not in {escape(handler.stream)} yet, the first is due in {first}; one may be of this key"
    if report.queue is None and report.unread:
        at_least = "" if handler.lag_exact else "at least "
        entries = pluralize(report.unread, "entry", "entries")
        yield f"{handler.label} has not read {at_least}{entries} of {escape(handler.stream)}, which may hold messages of it"
    if (full := _full_queues(report)) is not None:
        yield f"It reads none of them now: {full[0]:,} messages are in key queues, of at most {full[1]:,}"


def _of_dead_letters(report: KeyReport) -> Iterator[str]:
    if report.dead_letters:
        count = pluralize(
            len(report.dead_letters), "of its messages is a dead letter", "of its messages are dead letters"
        )
        newest = report.dead_letters[0]
        yield f"{count}, the last one as {newest.reason}: {newest.error}"


def _mend(report: KeyReport) -> Iterator[str]:
    handler, queue = report.handler, report.queue
    on_stream = "" if report.is_only_stream else f" --stream {quoted(handler.stream)}"
    of_key = f"{handler.label} {quoted(report.key)}{on_stream}"
    if queue is not None and queue.parked_reason is not None and not report.is_migrating:
        yield f"millstream key unpark {of_key}"
    if queue is not None and queue.length and _is_to_blame(report) and not report.is_migrating:
        yield f"millstream key skip {of_key}  # or give its first message up"
    if queue is not None and queue.state == "backing off" and report.limit is None and _runs(handler):
        yield f"millstream key park {of_key} && millstream key unpark {of_key}  # to try it now, with all its attempts"
    if handler.pause is not None:
        yield f"millstream resume {handler.label}{'  # once the cause is mended' if handler.pause.by == 'breaker' else ''}"
    if handler.rate_override is not None and (_reads_at_rate(report) or (queue is not None and queue.state == "ready")):
        yield f"millstream rate clear {handler.label}{on_stream}  # back to the rate in code; or set another"
    if not handler.consumers and (report.queue is not None or report.unread):
        yield start_command(handler.engine, handler.app)
    if _full_queues(report) is not None:
        yield f"millstream key list {handler.label}{on_stream}  # the keys with most messages"
    if queue is None and report.delayed is not None:
        yield f"millstream delayed list {quoted(handler.stream)}"
    if report.dead_letters:
        yield f"millstream dlq list {handler.label} --key {quoted(report.key)}{on_stream}"
        yield f"millstream dlq redrive {handler.label} --key {quoted(report.key)}{on_stream}"


def _is_to_blame(report: KeyReport) -> bool:
    """Whether the first message keeps the others waiting: not one that has never been tried, as after a skip."""
    queue = report.queue
    has_failed = bool(report.last.error) or (queue is not None and queue.failed_attempts + queue.expired_leases > 0)
    is_parked = queue is not None and queue.state == "parked"
    return (is_parked and has_failed) or report.is_blocked or report.long_run is not None


def _runs(handler: HandlerReport) -> bool:
    return handler.consumers > 0 and handler.pause is None


def _reads_at_rate(report: KeyReport) -> bool:
    """Whether the rate of the handler decides when unread messages of the key are read."""
    return report.queue is None and report.unread > 0


def _full_queues(report: KeyReport) -> tuple[int, int] | None:
    """The messages in key queues and their limit, if these keep unread messages of the key from being read."""
    is_full = report.queued is not None and report.queued[0] >= report.queued[1]
    return report.queued if is_full and report.queue is None and report.unread else None
