"""Every error that millstream raises, as one tree.

MillstreamError
├── ConfigError            the app file, an option or a URL is wrong; the message says what to change
├── ServerError            the embedded redis-server could not be started or stopped
├── RedisError             what Redis answered, translated once, in `millstream.redis_client.client`
│   ├── Unavailable        away, loading, failing over, out of memory: try again later
│   │   ├── OutOfMemory    `maxmemory` is reached: nothing was written
│   │   └── StreamFull     the stream has as many entries as its producer allows: nothing was written
│   ├── NotReplicated      published, but not confirmed by the replicas that were asked for
│   ├── AccessDenied       authentication or an ACL rule refuses it
│   ├── WrongType          the key holds something else than the command needs
│   ├── GroupMissing       the consumer group does not exist (NOGROUP)
│   ├── Sealed             there are more partitions than this producer knows of: nothing was written
│   └── CommandFailed      any other refusal
│       └── ScriptMissing  the server does not have the script, and has to be sent its text
├── MessageError           one message cannot be processed; it becomes a dead letter
│   ├── DecodeError        its fields do not fit the handler's model
│   ├── MissingKey         it lacks the field that its handler is keyed by
│   ├── OutputError        what the handler returned cannot be written
│   └── Reject             the handler refuses it, without retries
├── LeaseError             a stream of a balanced service is not ours to take, or not ours any more
│   ├── StreamNotFound     nobody has announced it, or it is done
│   ├── AlreadyOwned       another consumer has it
│   ├── LeaseLost          this consumer has it no more
│   └── NameHeld           another process has the consumer's name
├── StaleOwner             a newer run has taken over; this one must stop
├── Unfinished             a handler broke off work that is not its own; all of it is done again
├── HandlerStuck           a handler went beyond its time limit and cannot be ended but with its process
├── DataLoss               entries that should have been read are gone from the stream
└── PipelineFailed         the pipeline stopped and cannot go on by itself
    └── SessionEnded       ... in this Spark session: another one may
"""

from collections.abc import Sequence


class MillstreamError(Exception):
    """Root of every error that millstream raises on purpose."""


class ConfigError(MillstreamError):
    """The app file, an option or a URL is wrong. The message is one line and says what to change."""


class ServerError(MillstreamError):
    """The embedded redis-server could not be started, reached or stopped."""


class RedisError(MillstreamError):
    """Redis refused a command or could not be reached."""


class Unavailable(RedisError):
    """Redis is away, loading, failing over or busy. Whether the command ran is not known: try again later."""


class OutOfMemory(Unavailable):
    """Redis has reached `maxmemory` and refused a write. Nothing was written: try again later."""


class StreamFull(Unavailable):
    """The stream has as many entries as the producer's `max_length` allows. Nothing was written: try again later."""


class NotReplicated(RedisError):
    """Entries are published, on the primary, but not confirmed by as many replicas as were asked for.

    `ids` are the entries. Publishing them again would double them, unless with the same `dedupe_id`: that asks anew.
    """

    def __init__(self, message: str, ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ids = ids


class AccessDenied(RedisError):
    """Redis refused the credentials, or an ACL rule refuses the command or the key."""

    @property
    def concerns_key(self) -> bool:
        """True if keys are refused: the same command may be allowed on others."""
        return any(
            words in str(self) for words in ("no permissions to access", "No permissions to access", "can't access")
        )


class WrongType(RedisError):
    """The key holds another type than the command needs."""


class GroupMissing(RedisError):
    """The consumer group, or its stream, does not exist."""


class Sealed(RedisError):
    """There are more partitions than the producer knows of: it must look again. Nothing was written."""


class CommandFailed(RedisError):
    """Redis refused the command for any other reason.

    * `code`: the first word of the error reply, such as `BUSYGROUP`, or `STALE` of a script; "" if the reply has none
    * `detail`: the rest of the error reply
    """

    def __init__(self, message: str, *, code: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.detail = detail


class ScriptMissing(CommandFailed):
    """Redis was sent the hash of a script that it does not have: it has to be sent its text."""


class MessageError(MillstreamError):
    """One message cannot be processed. It becomes a dead letter with this text as its reason."""


class DecodeError(MessageError):
    """The fields of a message do not fit the handler's model, or the schema of rows."""


class MissingKey(MessageError):
    """A message lacks the field that its handler is keyed by."""


class OutputError(MessageError):
    """What a handler returned, or kept in its state, cannot be written to Redis."""


class Reject(MessageError):
    """Raise it in a handler to make the message a dead letter at once, without retries."""


class LeaseError(MillstreamError):
    """A stream of a balanced service cannot be taken or ended. `stream`: which; `consumer`: who stands in the way."""

    def __init__(self, message: str, *, stream: str = "", consumer: str = "") -> None:
        super().__init__(message)
        self.stream = stream
        self.consumer = consumer


class StreamNotFound(LeaseError):
    """Nobody has announced the stream, or no consumer has read that yet, or it is done."""


class AlreadyOwned(LeaseError):
    """Another consumer has the stream, and is alive."""


class LeaseLost(LeaseError):
    """This consumer's lease on the stream has ended: it was too late, or has given it back. Others may work on it."""


class NameHeld(LeaseError):
    """Another living process has the consumer's name. Give each process its own."""


class StaleOwner(MillstreamError):
    """A newer run of the same handler has taken over. This one wrote nothing and must stop."""


class Unfinished(MillstreamError):
    """A handler broke off work that is not its own. Nothing of it was passed over: it is done again."""


class HandlerStuck(MillstreamError):
    """A handler went beyond its time limit and cannot be ended: end the process. Its failed attempt is noted."""


class DataLoss(MillstreamError):
    """Entries that should have been read are gone from the stream (trimmed, deleted, or Redis lost them)."""


class PipelineFailed(MillstreamError):
    """The pipeline stopped and cannot go on by itself. The message says what to do."""


class SessionEnded(PipelineFailed):
    """The Spark session that the pipeline ran on is over. It goes on in a new one."""


def text_of(error: BaseException) -> str:
    """Return what a foreign error says, even if its class cannot say it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the class is not ours; losing its text must not lose the message
        return "(its text cannot be shown)"
