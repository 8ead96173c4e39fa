"""Every error that millstream raises, as one tree.

MillstreamError
├── ConfigError            the app file, an option or a URL is wrong; the message says what to change
│   └── Incompatible       this program is too old for the stored progress
├── ServerError            the embedded redis-server could not be started, reached or stopped
├── RedisError             Redis refused a command or is unreachable (translated in `redis_client.error_translation`)
│   ├── Unavailable        Redis is unreachable, loading, failing over or busy: retry later
│   │   ├── OutOfMemory    `maxmemory` is reached: nothing was written
│   │   └── StreamFull     the stream is at its producer's `capacity`: nothing was written
│   ├── NotReplicated      published, but too few replicas confirmed it in time
│   ├── AccessDenied       the credentials are wrong, or an ACL rule refuses the command or key
│   ├── WrongType          the key holds another type than the command needs
│   ├── GroupMissing       the consumer group or its stream does not exist (NOGROUP)
│   ├── PartitionClosed    the partition is closed: there are more partitions now; nothing was written
│   └── CommandFailed      any other error reply
│       ├── KeyMissing     the command needs a key that exists
│       └── ScriptMissing  the server lacks the script (NOSCRIPT): its text has to be sent
├── MessageError           one message cannot be processed; it becomes a dead letter
│   ├── DecodeError        its fields do not fit the handler's model
│   ├── MissingKey         it lacks the field that its handler is keyed by
│   ├── OutputError        the handler's output or state cannot be written
│   └── Reject             the handler refuses it, without retries
├── LeaseError             a stream of a balanced service cannot be leased, or its lease has ended
│   ├── StreamNotFound     the stream is not announced, or done
│   ├── AlreadyOwned       another live consumer holds the lease
│   ├── LeaseLost          this consumer's lease has ended
│   └── NameHeld           another live process holds the consumer's name
├── StaleOwner             a newer run has taken over; this one must stop
├── Unfinished             work was left undone, by a handler's cancellation or a stop; it is repeated
├── HandlerPaused          the handler's breaker has paused it: fix the cause, then resume it
├── HandlerStuck           a handler exceeded its time limit and cannot be interrupted: end the process
├── DataLoss               entries were trimmed, deleted or lost before they were read
└── PipelineFailed         the pipeline stopped and cannot recover by itself
    └── SessionEnded       ... in this Spark session: run it again in a new one
"""

from collections.abc import Iterable, Sequence


class MillstreamError(Exception):
    """Root of every error that millstream raises on purpose. Catch it to catch them all."""


class ConfigError(MillstreamError):
    """The app file, an option or a URL is wrong. The message is one line and says what to change."""


class Incompatible(ConfigError):
    """A handler refuses to start: a newer millstream has stored its progress."""


class ServerError(MillstreamError):
    """The embedded redis-server could not be started, reached or stopped. The message names the cause."""


class RedisError(MillstreamError):
    """Redis refused a command or could not be reached. Catch a subclass to act on the cause."""


UNREACHABLE_HINT = " (is it running? see --url / MILLSTREAM_URL)"
"""What a person may check after an Unavailable error that is `unreachable`."""


class Unavailable(RedisError):
    """Redis is unreachable, loading, failing over or busy. It may have run the command: retry later, idempotently.

    `unreachable`: True if no connection could be opened, or it broke; False if the server has replied.
    """

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class OutOfMemory(Unavailable):
    """Redis has reached `maxmemory` and refused a write. Nothing was written: free memory, or retry later."""


class StreamFull(Unavailable):
    """The stream holds as many entries as the producer's `capacity` allows. Nothing was written: retry later."""


class NotReplicated(RedisError):
    """The primary has the entries, but fewer replicas than requested confirmed them in time.

    `ids` are the entries. Publishing them again duplicates them, except with the same `dedupe_id`: that only repeats
    the check of the replicas.
    """

    def __init__(self, message: str, ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ids = ids


class AccessDenied(RedisError):
    """Redis refused the credentials, or an ACL rule refuses the command or the key: change the user or its rules.

    `concerns_key`: True if the ACL refuses the key: the same command may be allowed on other keys.
    `concerns_credentials`: True if Redis refused the credentials: no command is allowed, and no right mends it.
    """

    def __init__(self, message: str, *, concerns_key: bool = False, concerns_credentials: bool = False) -> None:
        super().__init__(message)
        self.concerns_key = concerns_key
        self.concerns_credentials = concerns_credentials


class WrongType(RedisError):
    """The key holds another type than the command needs: another program uses the name. Choose another name.

    `names_key`: True if the message names the key and its type.
    """

    def __init__(self, message: str, *, names_key: bool = False) -> None:
        super().__init__(message)
        self.names_key = names_key


class GroupMissing(RedisError):
    """The consumer group, or its stream, does not exist: create it before reading."""


class PartitionClosed(RedisError):
    """The partition is closed: its stream has more partitions now than the producer knows of.

    Nothing was written. Reload the partition map and publish again; `PartitionedProducer` does so by itself.
    """


class CommandFailed(RedisError):
    """Redis refused the command for any other reason.

    * `code`: the first word of the error reply, such as `BUSYGROUP`, or `STALE` of a script; "" if the reply has none
    * `detail`: the rest of the error reply
    """

    def __init__(self, message: str, *, code: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.detail = detail


class KeyMissing(CommandFailed):
    """The command needs a key that exists: XINFO, or XGROUP without MKSTREAM, of a missing stream."""


class ScriptMissing(CommandFailed):
    """The server does not have the script with this hash (NOSCRIPT). The client sends the script's text and retries."""


class MessageError(MillstreamError):
    """One message cannot be processed. It becomes a dead letter with this text as its error; other messages go on."""


class DecodeError(MessageError):
    """The fields of a message do not fit the handler's model, or the schema of a DataFrame."""


class MissingKey(MessageError):
    """A message lacks the field that its handler is keyed by. `missing_key="unordered"` processes it without a key."""


class OutputError(MessageError):
    """A handler's output or state, or a row of a sink, cannot be written to Redis. The message names the field."""


class Reject(MessageError):
    """Raise it in a handler to dead-letter the message at once, without retries."""


class LeaseError(MillstreamError):
    """A stream of a balanced service cannot be leased or ended. `stream`: its name; `consumer`: the current owner."""

    def __init__(self, message: str, *, stream: str = "", consumer: str = "") -> None:
        super().__init__(message)
        self.stream = stream
        self.consumer = consumer


class StreamNotFound(LeaseError):
    """The stream was not announced to the service, no consumer has read the announcement yet, or the stream is done."""


class AlreadyOwned(LeaseError):
    """Another live consumer holds the lease of the stream. Retry once it has released it."""


class LeaseLost(LeaseError):
    """This consumer's lease on the stream has ended: it expired or was released. Stop: another consumer may own it."""


class NameHeld(LeaseError):
    """Another live process holds the consumer's name. Give each process its own name."""


class StaleOwner(MillstreamError):
    """A newer run of the same handler, or a newer owner of the key, has taken over. Nothing was written: stop."""


class BatchBehind(StaleOwner):
    """The sink has published a later batch: another run was active on this checkpoint, or the checkpoint was set back.

    A query that starts again reads its checkpoint again, so this error may come once and not again.
    """


class Unfinished(MillstreamError):
    """Work was left undone: a handler cancelled tasks that are not its own, or the run was stopped. It is repeated."""


class HandlerPaused(MillstreamError):
    """The breaker of a handler has paused it, as nearly all messages became dead letters. Resume it once it is fixed."""


class HandlerStuck(MillstreamError):
    """A handler exceeded its time limit and cannot be interrupted: end the process. The failed attempt is recorded."""


class DataLoss(MillstreamError):
    """Entries left the stream before they were read: a client trimmed or deleted them, or Redis lost them."""


class PipelineFailed(MillstreamError):
    """The pipeline stopped and cannot recover by itself. The message says what to do."""


class SessionEnded(PipelineFailed):
    """The Spark session of the pipeline has ended. Run the pipeline again in a new session."""


def did_you_mean(word: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Return the hint of an error about an unknown word: the most similar choice, or `otherwise` if none is similar."""
    import difflib  # most processes meet no unknown word

    similar = difflib.get_close_matches(word, list(choices), 1)
    return f"did you mean {similar[0]!r}?" if similar else otherwise


def install_hint(extra: str) -> str:
    """Return how to install an optional extra. There is no release yet: only a clone can be installed."""
    return f"run this in your clone of millstream: pip install '.[{extra}]'"


def text_of(error: BaseException) -> str:
    """Return the text of an error whose class is not ours, or a placeholder if its `__str__` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the class is not ours; losing its text must not lose the message
        return "(its text cannot be shown)"
