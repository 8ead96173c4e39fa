"""The names of all keys that millstream stores in Redis, each with its type and what it holds: the catalogue.

Scripts derive some of them from a declared key of the same object, by the same suffix; a test compares them with this
catalogue. All keys that belong to one stream share that stream's hash slot, so that one script can change them together, on Redis
Cluster too (Redis Cluster specification, "hash tags").
"""

import re
import socket
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, overload

import msgspec

from millstream.errors import ConfigError

PREFIX = "millstream"
MASTER = "master"
"""The app in the keys of masters, which delegate a group's messages to consumers in any language. No app may have this
name.
"""

WAITING = "waiting"
"""The consumer that holds the pending entries which no worker has leased."""

REDRIVE_FIELD = b"millstream.redrive"
"""Reserved field, the first one, of a redriven entry or of a timer's: names the handler that it is meant for."""

TIMER_FIELD = b"millstream.timer"
"""Reserved field, the second one, of an entry that a timer has added: the timer's name."""

EDITED_FIELD = b"millstream.edited"
"""Reserved field, the last one, of an entry that was redriven with other fields: names the operator who edited it."""

FIRING_FIELD = b"millstream.firing"
"""Reserved field, the last one, of an entry that a schedule has published: when its firing was due, in Unix ms."""

_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,100}")
_SERVICE = re.compile(r"[A-Za-z0-9_.:-]{1,250}")


def own_pairs(pairs: Sequence[bytes]) -> Sequence[bytes]:
    """Return the fields of an entry as its handler sees them: without the name of that handler, and of a timer."""
    if not pairs or pairs[0] != REDRIVE_FIELD:  # an entry that was trimmed while it was in flight has no field left
        return pairs
    return pairs[2:] if is_redriven(pairs) else pairs[4:]


def is_redriven(pairs: Sequence[bytes]) -> bool:
    """Return whether the entry with these fields was a dead letter before: it names its handler, and no timer."""
    is_for_one = bool(pairs) and pairs[0] == REDRIVE_FIELD
    return is_for_one and not (len(pairs) > 2 and pairs[2] == TIMER_FIELD)


def is_edited(pairs: Sequence[bytes]) -> bool:
    """Return whether the entry with these fields is the edited copy of a dead letter."""
    return len(pairs) > 2 and pairs[0] == REDRIVE_FIELD and pairs[-2] == EDITED_FIELD


def is_identifier(name: str) -> bool:
    """Whether `name` can be part of a Redis key, a group name and a folder name."""
    return bool(_IDENTIFIER.fullmatch(name))


def check_identifier(kind: str, name: str) -> str:
    """Return `name` if it can be part of a Redis key, a group name and a folder name; raise ConfigError if not."""
    if not is_identifier(name):
        raise ConfigError(f"{kind} {name!r} must be 1 to 100 letters, digits, '_' or '-'")
    return name


def host_name(most: int) -> str:
    """Return the first `most` characters of this machine's name, with only characters that a consumer's name may
    have.
    """
    return "".join(char if char.isalnum() else "-" for char in socket.gethostname())[:most]


def is_service(name: str) -> bool:
    """Whether `name` can name a service whose consumers share streams."""
    return bool(_SERVICE.fullmatch(name))


def check_service(name: str) -> str:
    """Return `name` if it can name a service whose consumers share streams; raise ConfigError if not."""
    if not is_service(name):
        raise ConfigError(f"service name {name!r} must be 1 to 250 letters, digits, '_', '-', '.' or ':'")
    return name


def hash_tag(key: str) -> str:
    """Return the part of `key` that Redis Cluster hashes: from its first `{` to the next `}`, or else all of it."""
    start = key.find("{")
    end = key.find("}", start + 1)
    return key[start + 1 : end] if start >= 0 and end > start + 1 else key


def can_share_slot(name: str) -> bool:
    """True if other keys can be put into the hash slot of the stream `name`."""
    return "}" not in hash_tag(name)


def check_stream(name: str) -> str:
    """Return the stream name `name` if other keys can be put into its hash slot; raise ConfigError if not."""
    if not can_share_slot(name):
        raise ConfigError(
            f"the stream name {name!r} cannot be used, as no other key can share its slot on Redis Cluster: it has a "
            "'}' but no tag in braces before it; rename the stream, or use a pattern that excludes it"
        )
    return name


def is_pattern(name: str) -> bool:
    """True if `name` is a pattern, as Redis matches them (`SCAN`, ACL rules)."""
    return any(char in name for char in "*?[")


def check_base(name: str) -> str:
    """Return `name` if it can be the base of partitions; raise ConfigError if not."""
    if not name or any(char in name for char in "{},*?[]") or name != name.strip():
        raise ConfigError(f"the base of partitions {name!r} must be text without braces, brackets, commas, '*' and '?'")
    return name


def stage_group(app: str, stage: str) -> str:
    """Return the consumer group that shows the progress of a stage of an app; handlers' groups have other names."""
    return f"{PREFIX}-stage:{app}.{stage}"


def stage_of(group: str) -> tuple[str, str] | None:
    """Return the app and the stage whose progress a consumer group shows; None if it is no such group."""
    app, _, stage = group.removeprefix(f"{PREFIX}-stage:").partition(".")
    return (app, stage) if app and stage and stage_group(app, stage) == group else None


def worker_name_key(app: str, worker: str) -> str:
    """String, with a time to live: the holder of a worker's name."""
    return f"{PREFIX}:worker:{app}:{worker}"


def live_workers_key(app: str, handler: str) -> str:
    """Sorted set, with a time to live: the live workers of a handler, until when. No worker can have this name."""
    return worker_name_key(app, f"alive:{handler}")


def ready_streams_key(app: str, handler: str) -> str:
    """List, with a time to live: streams that may have key queues to lease. No worker can have this name."""
    return worker_name_key(app, f"hints:{handler}")


def router_session_key(app: str, handler: str, token: str) -> str:
    """String, with a time to live: exists while the router of streams that has this token is alive. No worker can have
    this name.
    """
    return worker_name_key(app, f"router:{handler}:{token}")


def ended_process_key(app: str, incarnation: str) -> str:
    """String, with a time to live: how one worker process (incarnation) ended. No worker can have this name."""
    return f"{PREFIX}:worker:{app}:ended:{incarnation}"


def restarts_key(app: str) -> str:
    """Sorted set, with a time to live: recent restarts of an app's worker processes, until when. No worker can have
    this name.
    """
    return worker_name_key(app, ":restarts")


def long_runs_key(app: str) -> str:
    """Sorted set, with a time to live: messages that workers of an app have been running for long, until when. No
    worker can have this name.
    """
    return worker_name_key(app, ":long-runs")


def running_code_key(app: str, handler: str) -> str:
    """Sorted set, with a time to live: the code and settings with which a handler runs, until when. No worker can have
    this name.
    """
    return worker_name_key(app, f":code:{handler}")


def run_times_key(app: str, handler: str) -> str:
    """Sorted set, with a time to live: how long runs of a handler took on each worker in the last minute, until
    when. No worker can have this name.
    """
    return worker_name_key(app, f":runs:{handler}")


def redrive_reports_key(app: str, handler: str) -> str:
    """Sorted set, with a time to live: redrives of a handler's dead letters that consoles do at a rate, until when. No
    worker can have this name.
    """
    return worker_name_key(app, f":redrives:{handler}")


def redrive_stop_key(app: str, redrive: str) -> str:
    """String, with a time to live: since when a redrive at a rate has to stop. No worker can have this name."""
    return worker_name_key(app, f":redrive-stop:{redrive}")


def query_progress_key(app: str, query: str) -> str:
    """String, with a time to live: the last micro-batch of a query on Spark (msgpack). No worker can have this name."""
    return worker_name_key(app, f":progress:{query}")


def worker_drain_key(app: str, worker: str) -> str:
    """String, with a time to live: the holder of a worker's name that has to end the worker, and since when. No worker
    can have this name. It is in the hash slot of the worker's name, so that one script reads both.
    """
    return worker_name_key(app, f":drain:{{{worker_name_key(app, worker)}}}")


def audit_key() -> str:
    """Stream, capped: what operators have changed through the console and by commands."""
    return f"{PREFIX}:console:audit"


def ended_sessions_key() -> str:
    """Sorted set, capped: the sessions of the console that were logged out, by their expiry in Unix seconds."""
    return f"{PREFIX}:console:ended-sessions"


def history_key() -> str:
    """Stream, capped: the figures of all handlers in the last 24 hours, which the console shows."""
    return f"{PREFIX}:console:history"


def history_writer_key() -> str:
    """String, with a time to live: the one console that adds to the history."""
    return f"{PREFIX}:console:history-writer"


def run_name(pipeline: str) -> str:
    """Return the worker name under which a Spark run of a handler or stage announces that it is alive: no worker can
    have it.
    """
    return f"spark:{pipeline}"


def partition_name(base: str, partition: int) -> str:
    """Return the stream of a base's partition number `partition`, from 0 on. Each has a hash slot of its own."""
    return f"{{{base}.{partition}}}"


def to_wire(name: str) -> bytes:
    """Return the bytes of a name in Redis. Bytes that are not UTF-8 are escaped in text, as in PEP 383."""
    return name.encode("utf-8", "surrogateescape")


def from_wire(name: bytes) -> str:
    """Return the text of a name in Redis: the reverse of `to_wire`."""
    return name.decode("utf-8", "surrogateescape")


class _WithBase(Protocol):
    @property
    def base(self) -> str:
        """The common prefix of the keys."""


class Key(msgspec.Struct, frozen=True):
    """One key of a handler, a stream, a sink or a service: its suffix, its type in Redis (`kind`), and what it holds.

    Read from an object of one of the classes below, it is the key's name.
    """

    suffix: str
    kind: str
    holds: str

    @overload
    def __get__(self, keys: None, owner: type) -> "Key": ...

    @overload
    def __get__(self, keys: _WithBase, owner: type) -> str: ...

    def __get__(self, keys: _WithBase | None, owner: type) -> "Key | str":
        """Return the name of the key, or the key itself for the class."""
        return self if keys is None else f"{keys.base}:{self.suffix}"


class HandlerKeys(msgspec.Struct, frozen=True):
    """The Redis keys of one handler on one stream, all in the stream's hash slot. Raises ConfigError: `check_stream`."""

    app: str
    handler: str
    stream: str

    def __post_init__(self) -> None:
        check_stream(self.stream)

    @property
    def base(self) -> str:
        """The common prefix of the handler's keys."""
        return f"{PREFIX}:{{{hash_tag(self.stream)}}}:{self.stream}:{self.label}"

    @property
    def commit_keys(self) -> tuple[str, ...]:
        """The KEYS of `commit.lua`, and of every script that works on key queues, but for the output streams."""
        return (self.meta, self.offsets, self.state, self.crashes, self.dead_letters, self.incomplete, self.stream)

    meta = Key("meta", "hash", "committed id, epoch of the newest run, counters")
    offsets = Key("offsets", "hash", "key or entry -> id of the last entry committed in the batch in flight")
    incomplete = Key("incomplete", "hash", "entry -> its worker, for the incomplete entries below the committed id")
    state = Key("state", "hash", "key -> its durable state (msgpack)")
    crashes = Key("crashes", "hash", "entry -> how often it was started by a task that did not survive it")
    dead_letters = Key("dead", "stream", "dead letters")
    resent = Key("resent", "hash", "edited copy under way -> its dead letter; `l` and a dead letter -> its edited copy")

    ready = Key("ready", "list", "key queues that can be run, by workers or on Spark, round robin")
    owners = Key("owners", "hash", "key queue -> token of the worker's lease")
    leases = Key("leases", "sorted set", "key queue -> when its lease ends, in Unix milliseconds")
    backoff = Key("backoff", "sorted set", "key queue -> when its next attempt is due, in Unix milliseconds")
    parked = Key("parked", "hash", "key queue -> since when it is parked (Unix milliseconds), and why")
    canceled = Key("canceled", "hash", "key queue -> message that has canceled entries of the key, last id canceled")
    notify = Key("notify", "list", "has an element when an idle worker should fetch; idle workers block on it")
    router = Key("router", "string", "the worker that enqueues new entries into their key queues")

    awaiting = Key("awaiting", "hash", "key queues that wait until their key has left an older partition")
    imported = Key("imported", "hash", "keys whose state was imported from an older partition, where it may still be")

    consumers = Key("consumers", "hash", "consumer of a master -> its registration (JSON)")
    unowned = Key(
        "unowned", "hash", "lease of a master -> since when its entry is pending without a consumer of its own"
    )
    done = Key("done", "hash", "entry that a master's consumer has finished last -> the consumer")
    done_before = Key("done-before", "hash", "the same, of the entries before those in `done`")

    def last_reply(self, worker: str) -> str:
        """String: number of a worker's last commit, and the reply to it."""
        return f"{self.base}:{worker}:last"

    def queue(self, name: bytes) -> bytes:
        """List: ids of the entries of a key queue in stream order; `name` is b"k" and the key, or b"i" and an
        entry id.
        """
        return to_wire(self.base) + b":" + name + b":queue"

    def permits(self, value: bytes) -> bytes:
        """Hash: holder of a permit of a value of the limit's field -> its key queue, or until when the permit lasts."""
        return f"{self.base}:permits:".encode() + value

    def permits_checked(self, value: bytes) -> bytes:
        """String: there for a while after all permits of a value were checked for those that have ended."""
        return f"{self.base}:permits-checked:".encode() + value

    def limited(self, value: bytes) -> bytes:
        """Sorted set: key queue that waits for a permit of a value -> when it may ask again, in Unix milliseconds."""
        return f"{self.base}:limited:".encode() + value

    def free_at(self, value: bytes) -> bytes:
        """Hash: when the rate lets the next message of a value begin (`at`), and what the last one took (`takes`), in ms."""
        return f"{self.base}:free-at:".encode() + value

    def forwarded(self, stream: str, entry_id: bytes) -> str:
        """String: id under which an entry of an older partition was forwarded to this one."""
        return f"{self.base}:forwarded:{stream}:{entry_id.decode()}"

    @property
    def label(self) -> str:
        """The name of the handler that is shown to users."""
        return f"{self.app}.{self.handler}"

    @property
    def group(self) -> str:
        """The consumer group on the stream that shows this handler's progress to any Redis tool.

        Masters work on a group that other programs created: there the handler is named after it.
        """
        return self.handler if self.app == MASTER else f"{PREFIX}:{self.label}"

    @classmethod
    def parse(cls, key: str) -> "HandlerKeys":
        """Parse one of the keys above; raise ConfigError for any other key."""
        head, _, kind = key.rpartition(":")
        base, _, owner = head.rpartition(":")
        app, _, handler = owner.partition(".")
        tag_end = base.find("}:")  # the first: `check_stream` keeps it out of the tag
        found = cls(app, handler, base[tag_end + 2 :])
        if tag_end < 0 or not kind or f"{found.base}:{kind}" != key:
            raise ConfigError(f"{key!r} is not a key of a millstream handler")
        return found


class StreamKeys(msgspec.Struct, frozen=True):
    """The Redis keys of a stream that belong to no handler, all in the stream's hash slot. Raises ConfigError."""

    stream: str

    def __post_init__(self) -> None:
        check_stream(self.stream)

    @property
    def base(self) -> str:
        """The common prefix of the keys."""
        return f"{PREFIX}:{{{hash_tag(self.stream)}}}:{self.stream}"

    @classmethod
    def parse(cls, key: str) -> "StreamKeys":
        """Parse one of the keys below that have a suffix alone; raise ConfigError for any other key."""
        base, _, kind = key.rpartition(":")
        found = cls(base[base.find("}:") + 2 :])
        if not kind or f"{found.base}:{kind}" != key:
            raise ConfigError(f"{key!r} is not a key of a stream")
        return found

    due = Key("due", "sorted set", "id of a delayed message -> when it is due, in Unix milliseconds")
    delayed = Key("delayed", "hash", "id of a delayed message -> its items (msgpack)")
    partition = Key(
        "partition", "hash", "of a partition: the generation that its producers must know, and its close id"
    )
    partitions = Key("partitions", "hash", "of a base: its partition map (`layout`)")
    schedules = Key("schedules", "hash", "schedule -> its record: its last firing, in Unix milliseconds, and its rule")

    def producer(self, token: str) -> str:
        """String: sequence number of the last batch of the producer `token`, and the ids of its entries."""
        return f"{self.base}:producer:{token}"

    def staged(self, sink: str, token: str) -> str:
        """List: chunks of rows, staged for `sink` by the task attempt `token`; or a hash: how many are left to publish."""
        return f"{self.base}:sink:{sink}:{token}"

    def dedupe(self, dedupe_id: bytes) -> str:
        """String: id of the first entry that was published under the caller's own `dedupe_id`."""
        # Hashed: it may be long, contain a colon, or be private.
        return f"{self.base}:dedupe:{blake2b(dedupe_id, digest_size=16).hexdigest()}"


class GroupBatchKeys(msgspec.Struct, frozen=True):
    """The Redis keys of the batches of `consumer` in the consumer group `group` of `stream`, all in the stream's hash
    slot. Raises ConfigError.
    """

    stream: str
    group: str
    consumer: str

    def __post_init__(self) -> None:
        check_identifier("consumer name", self.consumer)

    @property
    def base(self) -> str:
        """The common prefix of the keys. No two share one: only the group's name may hold a colon."""
        return f"{StreamKeys(self.stream).base}:batch:{self.group}:{self.consumer}"

    record = Key(
        "record", "hash", "epoch of the newest run; token, number and part size of the last batch; entries gone"
    )

    def ids(self, token: str, batch: int | str) -> str:
        """List: ids of the entries of a batch."""
        return f"{self.base}:{token}.{batch}"


class SinkKeys(msgspec.Struct, frozen=True):
    """The Redis keys of the sink `sink` that belong to no stream, all in one hash slot. Raises ConfigError."""

    sink: str

    def __post_init__(self) -> None:
        check_identifier("sink id", self.sink)

    @property
    def base(self) -> str:
        """The common prefix of the keys."""
        return f"{PREFIX}:{{sink:{self.sink}}}"

    record = Key("record", "hash", "epoch of the newest run, last decided batch, state of the batch under way")
    staged = Key("staged", "set", "`token stream`, one for each staged part of a task")

    def run(self, run: str) -> str:
        """String: the epoch of a run."""
        return f"{self.base}:run:{run}"


class ServiceKeys(msgspec.Struct, frozen=True):
    """The Redis keys of the streams that the consumers of `service` share, all in one hash slot. Raises ConfigError."""

    service: str

    def __post_init__(self) -> None:
        check_service(self.service)

    @property
    def label(self) -> str:
        """The name shown to users: a handler's own service has the handler's name."""
        return self.service.removeprefix(f"{PREFIX}:")

    @classmethod
    def of_handler(cls, label: str) -> "ServiceKeys":
        """Return the keys of a handler's own service."""
        return cls(f"{PREFIX}:{label}")

    @property
    def input(self) -> str:
        """Stream: an entry announces a stream."""
        return f"{self.service}-input"

    @property
    def group(self) -> str:
        """The consumer group on `input`, which shows the owners."""
        return f"{self.service}-group"

    @property
    def base(self) -> str:
        """The common prefix of the other keys."""
        return StreamKeys(self.input).base

    meta = Key("meta", "hash", "newest token, last heartbeat, creation; of a handler's own service also its handler")
    streams = Key("streams", "hash", "stream -> its announcement")
    owners = Key("owners", "hash", "stream -> token and consumer")
    unassigned = Key("unassigned", "list", "unassigned streams, the next one first")
    stream_errors = Key("errors", "hash", "stream -> token of its owner, and why that excludes the stream")
    losses = Key("losses", "hash", "stream -> how many owners were lost in a row")
    released = Key("released", "hash", "stream -> token under which it was released last")
    consumers = Key("consumers", "hash", "consumer -> incarnation, weight and limit")
    alive = Key("alive", "sorted set", "consumer -> when its leases end, in Unix milliseconds")
    moves = Key("moves", "string", "how many streams have moved in this period of rebalancing")
    events = Key("events", "stream", "events of leases; consumers block on it")
    dead = Key("dead", "stream", "dead-lettered announcements, and why")

    def streams_of(self, consumer: str) -> str:
        """Set: the streams of a consumer."""
        return f"{self.base}:of:{consumer}"
