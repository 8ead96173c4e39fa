"""Names of everything that millstream keeps in Redis.

All keys that belong to one stream share that stream's hash slot, so that one script can change them together,
on Redis Cluster too (Redis Cluster specification, "hash tags").
"""

import re
from dataclasses import dataclass

from millstream.errors import ConfigError

PREFIX = "millstream"
REDRIVE_FIELD = b"millstream.redrive"
"""Reserved field: a redriven entry carries it, naming the handler that it is meant for."""

_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,100}")


def check_identifier(kind: str, name: str) -> str:
    """Return `name` if it can be part of a Redis key, a group name and a folder; raise ConfigError if not."""
    if not _IDENTIFIER.fullmatch(name):
        raise ConfigError(f"{kind} {name!r} must be 1 to 100 letters, digits, '_' or '-'")
    return name


def hash_tag(key: str) -> str:
    """Return the part of `key` that Redis Cluster hashes: what stands in its first non-empty braces, or all."""
    start = key.find("{")
    end = key.find("}", start + 1)
    return key[start + 1 : end] if start >= 0 and end > start + 1 else key


@dataclass(frozen=True, slots=True)
class HandlerKeys:
    """The Redis keys of one handler on one stream, all in the stream's hash slot.

    * `meta`: hash with the committed `frontier`, the `epoch` of the newest run and counters
    * `marks`: hash key or entry -> id of the last entry committed in the batch in flight
    * `state`: hash key -> the key's state (msgpack)
    * `strikes`: hash entry id -> times it was started by a task that did not end
    * `dead`: stream of dead letters
    """

    app: str
    handler: str
    stream: str

    @property
    def base(self) -> str:
        """The common prefix of the handler's keys."""
        return f"{PREFIX}:{{{hash_tag(self.stream)}}}:{self.stream}:{self.app}.{self.handler}"

    @property
    def meta(self) -> str:
        """Hash: frontier, epoch, counters."""
        return f"{self.base}:meta"

    @property
    def marks(self) -> str:
        """Hash: last committed id of each key in the batch in flight."""
        return f"{self.base}:marks"

    @property
    def state(self) -> str:
        """Hash: durable state of each key."""
        return f"{self.base}:state"

    @property
    def strikes(self) -> str:
        """Hash: how often an entry was started without coming to an end."""
        return f"{self.base}:strikes"

    @property
    def dead(self) -> str:
        """Stream: dead letters."""
        return f"{self.base}:dead"

    @property
    def group(self) -> str:
        """The consumer group on the stream that shows this handler's progress to any Redis tool."""
        return f"{PREFIX}:{self.app}.{self.handler}"

    @classmethod
    def parse(cls, key: str) -> "HandlerKeys":
        """Read the names back from one of the keys above; raise ConfigError for any other key."""
        head, _, kind = key.rpartition(":")
        base, _, owner = head.rpartition(":")
        app, _, handler = owner.partition(".")
        tag_end = base.find("}:")
        found = cls(app, handler, base[tag_end + 2 :])
        if tag_end < 0 or not kind or f"{found.base}:{kind}" != key:
            raise ConfigError(f"{key!r} is not a key of a millstream handler")
        return found
