"""What a master is told."""

from dataclasses import dataclass, field

from millstream.errors import ConfigError
from millstream.model import Retry
from millstream.redis_client.key_names import MASTER, HandlerKeys, check_identifier, check_stream

MOST_TICKETS = 1_000
"""Most tickets that one consumer may work on at once."""

_LEAST_LEASE_MS = 1_000


@dataclass(frozen=True, kw_only=True)
class MasterSettings:
    """What all masters of one group are told, and should be told alike.

    * `ticket_stream`, `group`: the stream and its consumer group
    * `master`: this master's name, for people
    * `key`: the field that messages are ordered by
    * `ping_ms`, `ping_failures`: how often health URLs are called, and after how many failures a consumer counts as dead
    * `min_idle_ms`: how long a message is pending outside of all lines until it is taken care of
    * `lease_ms`: for how long from a master's last look a lease is shown to last; no master ends one because that is over
    * `delegation_ms`: how long a consumer, however healthy, may have one message
    * `max_tickets`: messages that a consumer has at once if it does not say
    * `most_waiting`: entries that are held in lines at most; more wait in the stream
    * `retry`: what happens when consumers fail

    Times are in milliseconds. Raises ConfigError.
    """

    ticket_stream: str
    group: str
    master: str = MASTER
    key: str = "ticket_id"
    ping_ms: int = 5_000
    ping_failures: int = 3
    min_idle_ms: int = 60_000
    lease_ms: int = 30_000
    delegation_ms: int = 300_000
    max_tickets: int = 1
    most_waiting: int = 100_000
    retry: Retry = field(default_factory=Retry)

    def __post_init__(self) -> None:
        check_stream(self.ticket_stream)
        check_identifier("concurrency_stream_group", self.group)
        if not self.ticket_stream or not self.key:
            raise ConfigError("a master needs the names of its ticket_stream and of the field that is its key")
        if not 1 <= self.max_tickets <= MOST_TICKETS:
            raise ConfigError(f"max_tickets={self.max_tickets}: use 1 to {MOST_TICKETS:,}")
        if self.lease_ms < _LEAST_LEASE_MS:
            raise ConfigError(f"a lease of {self.lease_ms} ms is too short: use {_LEAST_LEASE_MS:,} ms or more")
        for name in ("ping_ms", "ping_failures", "min_idle_ms", "delegation_ms", "most_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be positive")

    @property
    def keys(self) -> HandlerKeys:
        """Where the group's progress is kept in Redis."""
        return HandlerKeys(MASTER, self.group, self.ticket_stream)

    @property
    def label(self) -> str:
        """The name of the work in figures and dead letters."""
        return f"{MASTER}.{self.group}"

    @property
    def silent_ms(self) -> int:
        """How long a consumer may be silent until it may count as dead."""
        return self.ping_ms * self.ping_failures
