"""The names of workers: each is held by one supervisor at a time, so that nobody goes on with another's entries."""

import secrets

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, StaleOwner
from millstream.redis_client.client import Client, Script
from millstream.redis_client.key_names import check_identifier, held_name, host_name
from millstream.worker.incarnations import HELD_MS, ProcessEnd, note_end

HOLD_NAME = Script("shared/hold_name")

_MOST_NAMES = 10_000


class StaticMembership:
    """The names `<base>-<n>` of an app's workers that one supervisor holds; keep them with `renew`.

    After a restart it gets the same ones, once they are free: `HELD_MS` after it was last heard of, or at once if it
    has let go of them. Raises RedisError.
    """

    def __init__(self, client: Client, app: str, base: str | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._app = app
        self._base = check_identifier("worker name", base) if base else None
        self.token = secrets.token_hex(8)
        """Under which the names are held."""
        self._clock = clock
        self.held: list[str] = []

    def take(self, count: int) -> list[str]:
        """Take `count` names. With a base of one's own they are `base-0` to `base-<count - 1>`, and must be free.

        May be repeated. Raises ConfigError if another supervisor keeps one of them.
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
        """Keep the names; call it every few seconds. Raises StaleOwner if another has taken one."""
        for name in self.held:
            if not self._set(name, HELD_MS):
                raise StaleOwner(f"another worker is called {name!r} now; give each its own --name")

    def release(self) -> None:
        """Let go of the names."""
        for name in self.held:
            self._set(name, 0)
        self.held = []

    def note_end(self, incarnation: str, end: ProcessEnd) -> None:
        """Note how a process has ended that had one of the names."""
        note_end(self._client, self._app, incarnation, end)

    def _insist(self, name: str) -> None:
        # Its last holder may have died a moment ago: then it becomes free soon.
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
