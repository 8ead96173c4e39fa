"""Where messages are stuck: handlers on streams with dead letters or stuck keys, found by the names of their keys."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import AccessDenied, ConfigError
from millstream.redis_client.client import SCAN_START, Client
from millstream.redis_client.key_names import PREFIX, HandlerKeys, from_wire
from millstream.redis_client.replies import fields_of_info

_KINDS = (HandlerKeys.dead_letters, HandlerKeys.parked, HandlerKeys.backoff, HandlerKeys.crashes)
"""Redis deletes these keys when they are empty, so that their names suffice."""

_SUFFIXES = tuple(f":{one.suffix}" for one in _KINDS)
_PATTERN = f"{PREFIX}:*:[{''.join(sorted(one.suffix[0] for one in _KINDS))}]*"


@dataclass(frozen=True, kw_only=True)
class StuckPlaces:
    """Handlers on streams where they have dead letters or may have stuck keys, sorted by name.

    * `is_partial`: there may be more, as not all names were scanned yet, or as there are too many
    * `age_ms`: what got stuck in the last so many milliseconds may be missing; None if all names were scanned just now
    """

    found: Sequence[HandlerKeys]
    is_partial: bool
    age_ms: float | None


class StuckScan:
    """Finds where messages are stuck, of `app` or all, by scans of the names of all keys. May be used by any thread.

    Each scan takes at most `budget_ms` milliseconds, and continues where the one before has stopped; after a restart or
    a failover of a server it begins anew, as its cursor is of the earlier process. What was found is kept until all
    names are scanned again, at most `most` places: others are added when some of these are stuck no more. Without the
    right to `INFO` each scan begins anew.
    """

    def __init__(
        self, app: str | None = None, *, most: int, budget_ms: float = 1_000.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._app = app
        self._most = most
        self._budget_ms = budget_ms
        self._clock = clock
        self._lock = threading.Lock()
        self._position = SCAN_START
        self._servers: list[str] = []  # those that the position is of
        self._round = 0
        self._round_began_ms = 0.0
        self._scanned_since_ms: float | None = None
        self._found: dict[HandlerKeys, int] = {}  # the round in which each was found last

    def run(self, client: Client) -> StuckPlaces:
        """Scan on, and return what is known. Raises RedisError."""
        with self._lock:
            began_ms = self._clock.monotonic_ms()
            self._check_servers(client)
            is_first = self._position == SCAN_START
            if is_first:
                self._round_began_ms = began_ms
            is_whole = self._scan(client, began_ms + self._budget_ms) and is_first
            since_ms = self._scanned_since_ms
            return StuckPlaces(
                found=sorted(self._found, key=lambda keys: (keys.app, keys.handler, keys.stream)),
                is_partial=since_ms is None or len(self._found) >= self._most,
                age_ms=None if is_whole or since_ms is None else self._clock.monotonic_ms() - since_ms,
            )

    def _check_servers(self, client: Client) -> None:
        """Begin a round anew if its position is, or may be, of other processes of servers, or in another order."""
        try:
            replies = client.execute_on_primaries("INFO", "server")
        except AccessDenied:  # one scan needs no such right
            replies = []
        servers = [fields_of_info(one).get("run_id", "") for _, one in replies]
        if servers != self._servers or not servers:
            self._servers = servers
            self._position = SCAN_START
            self._round += 1

    def _scan(self, client: Client, end_ms: float) -> bool:
        """Scan until all names are scanned, or the time is over. Return whether all are."""
        for page, position in client.scan_keys_from(_PATTERN, self._position):
            self._position = position
            for keys in filter(None, map(self._place_of, page)):
                if keys in self._found or len(self._found) < self._most:
                    self._found[keys] = self._round
            if self._clock.monotonic_ms() >= end_ms:
                return False
        self._found = {keys: last for keys, last in self._found.items() if last == self._round}
        self._scanned_since_ms = self._round_began_ms
        self._position = SCAN_START
        self._round += 1
        return True

    def _place_of(self, key: bytes) -> HandlerKeys | None:
        name = from_wire(key)
        with suppress(ConfigError):  # a key of another program
            if name.endswith(_SUFFIXES) and self._app in (None, (keys := HandlerKeys.parse(name)).app):
                return keys
        return None
