"""Static membership: worker names that survive restarts, each held by one supervisor at a time (as Kafka's KIP-345)."""

import secrets

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, StaleOwner
from millstream.redis_client.client import Client, Script
from millstream.redis_client.key_names import check_identifier, held_name, host_name
from millstream.worker.incarnations import HELD_MS, ProcessEnd, note_end

HOLD_NAME = Script("shared/hold_name")

_MOST_NAMES = 10_000


class StaticMembership:
    """The names `<base>-<n>` of an app's workers that one supervisor holds; call `renew` to keep them.

    After a restart the supervisor gets the same names: `NAME_LEASE_MS` after their last renewal, or at once if it
    released them. Raises RedisError.
    """

    def __init__(self, client: Client, app: str, base: str | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._app = app
        self._base = check_identifier("worker name", base) if base else None
        self.token = secrets.token_hex(8)
        """The token under which the names are held."""
        self._clock = clock
        self.held: list[str] = []

    def take(self, count: int) -> list[str]:
        """Acquire `count` names. With a given base they are `base-0` to `base-<count - 1>`, and must be free.

        May be repeated. Raises ConfigError if another supervisor holds one of them.
        """
        if self._base is None:
            host = host_name(80) or "worker"
            numbers = iter(range(_MOST_NAMES))
            while len(self.held) < count:
                self._try(f"{host}-{next(numbers)}")
        else:
            for number in range(count):
                self._insist(f"{self._base}-{number}")
        return self.held

    def renew(self) -> None:
        """Renew the names; call it every few seconds. Raises StaleOwner if another supervisor holds one."""
        for name in self.held:
            if not self._set(name, HELD_MS):
                raise StaleOwner(f"worker name {name!r} was taken by another worker; give each its own --name")

    def release(self) -> None:
        """Release the names."""
        for name in self.held:
            self._set(name, 0)
        self.held = []

    def note_end(self, incarnation: str, end: ProcessEnd) -> None:
        """Record in Redis how a process with one of the names has ended."""
        note_end(self._client, self._app, incarnation, end)

    def _insist(self, name: str) -> None:
        # Its last holder may have died a moment ago: then the name expires soon.
        end_ms = self._clock.monotonic_ms() + HELD_MS + 1_000
        while not self._try(name):
            if self._clock.monotonic_ms() >= end_ms:
                raise ConfigError(f"a worker called {name!r} is running; give this one another --name")
            self._clock.sleep_ms(500)

    def _try(self, name: str) -> bool:
        if name in self.held:
            return True
        if self._set(name, HELD_MS):
            self.held.append(name)
            return True
        return False

    def _set(self, name: str, held_ms: int) -> bool:
        key = held_name(self._app, name)
        return bool(self._client.script(HOLD_NAME, (key,), (self.token, held_ms)))
