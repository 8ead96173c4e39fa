"""MasterSettings: the settings of one master."""

from dataclasses import dataclass, field

from millstream.errors import ConfigError
from millstream.model import Retry
from millstream.redis_client.key_names import MASTER, HandlerKeys, check_identifier, check_stream

MAX_TICKETS = 1_000
"""Maximum `max_tickets` of a consumer."""

NAME_PATTERN = r"[A-Za-z0-9_.:@-]{1,100}"
"""The names that consumers may have, as a regular expression."""

MAX_ERROR_CHARS = 4_000
"""Maximum length of the `error` of a failed message."""

_LEAST_LEASE_MS = 1_000


@dataclass(frozen=True, kw_only=True)
class MasterSettings:
    """The settings of a master. All masters of one group should have the same.

    * `ticket_stream`, `group`: the stream and its consumer group
    * `master`: this master's name, shown to operators
    * `key`: the field that messages are ordered by
    * `ping_ms`, `ping_failures`: interval of the health checks, and the number of failures after which a consumer is
      dead
    * `claim_idle_ms`: idle time after which a message that is pending outside all key queues is claimed
    * `lease_ms`: lease time shown in Redis, from the last renewal; no master ends a lease because it has passed
    * `delegation_ms`: how long even a healthy consumer may hold one message
    * `max_tickets`: messages assigned to a consumer at once, if it gives no number itself
    * `max_queued`: maximum number of entries in key queues; more stay in the stream
    * `retry`: what happens to failed messages; `then="cancel"` is for handlers of an app only

    Times are in milliseconds. Raises ConfigError.
    """

    ticket_stream: str
    group: str
    master: str = MASTER
    key: str = "ticket_id"
    ping_ms: int = 5_000
    ping_failures: int = 3
    claim_idle_ms: int = 60_000
    lease_ms: int = 30_000
    delegation_ms: int = 300_000
    max_tickets: int = 1
    max_queued: int = 100_000
    retry: Retry = field(default_factory=Retry)

    def __post_init__(self) -> None:
        check_stream(self.ticket_stream)
        check_identifier("concurrency_stream_group", self.group)
        if not self.ticket_stream or not self.key:
            raise ConfigError("ticket_stream and key must not be empty: name the stream, and the field that is the key")
        if not 1 <= self.max_tickets <= MAX_TICKETS:
            raise ConfigError(f"max_tickets={self.max_tickets}: use 1 to {MAX_TICKETS:,}")
        if self.lease_ms < _LEAST_LEASE_MS:
            raise ConfigError(f"a lease of {self.lease_ms} ms is too short: use {_LEAST_LEASE_MS:,} ms or more")
        if self.retry.then == "cancel":
            raise ConfigError('Retry(then="cancel") is for handlers of an app: use "dead-letter", "park" or "block"')
        for name in ("ping_ms", "ping_failures", "claim_idle_ms", "delegation_ms", "max_queued"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be positive")

    @property
    def keys(self) -> HandlerKeys:
        """The Redis keys of the group's state."""
        return HandlerKeys(MASTER, self.group, self.ticket_stream)

    @property
    def label(self) -> str:
        """The handler's name in metrics and dead letters."""
        return f"{MASTER}.{self.group}"

    @property
    def dead_after_ms(self) -> int:
        """Milliseconds without a successful health check after which a consumer may be declared dead."""
        return self.ping_ms * self.ping_failures
