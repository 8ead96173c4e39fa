"""Static membership: worker names that survive restarts, each held by one supervisor at a time (as Kafka's KIP-345)."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.expiring_members import HOLD_MEMBERS
from millstream.delivery.restarts import Restart, record_restart
from millstream.delivery.running_code import HELD_MS, RunningCode, report_code
from millstream.errors import ConfigError, RedisError, StaleOwner
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import (
    check_identifier,
    host_name,
    live_workers_key,
    worker_drain_key,
    worker_name_key,
)
from millstream.redis_client.scripts import Script
from millstream.worker.incarnations import NAME_LEASE_MS, ProcessEnd, record_end

logger = logging.getLogger(__name__)

HOLD_NAME = Script("shared/hold_name")

_MOST_NAMES = 10_000
_DRAIN = 2
"""The reply of HOLD_NAME for a worker that has to end."""


class StaticMembership:
    """The names `<base>-<n>` of an app's workers that one supervisor holds; call `renew` to keep them.

    After a restart the supervisor gets the same names: `NAME_LEASE_MS` after their last renewal, or at once if it
    released them. Meanwhile they are announced as live workers of `handlers`, which run this code. Raises RedisError.
    """

    def __init__(
        self,
        client: Client,
        app: str,
        base: str | None,
        *,
        handlers: Mapping[str, RunningCode] = MappingProxyType({}),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._client = client
        self._app = app
        self._handlers = handlers
        self._live_keys = [live_workers_key(app, handler) for handler in handlers]
        self._base = check_identifier("worker name", base) if base else None
        self.token = secrets.token_hex(8)
        """The token under which the names are held."""
        self._clock = clock
        self.names: list[str] = []

    def acquire(self, count: int) -> list[str]:
        """Acquire `count` names. With a given base they are `base-0` to `base-<count - 1>`, and must be free.

        May be repeated. Raises ConfigError if another supervisor holds one of them.
        """
        if self._base is None:
            host = host_name(80) or "worker"
            numbers = iter(range(_MOST_NAMES))
            while len(self.names) < count:
                self._try_acquire(f"{host}-{next(numbers)}")
        else:
            for number in range(count):
                self._await_name(f"{self._base}-{number}")
        self._announce(NAME_LEASE_MS, self.names)
        self._report_code(HELD_MS)
        return self.names

    def renew(self) -> frozenset[str]:
        """Renew the names; call it every few seconds. Return those of the workers that an operator drains.

        Raises StaleOwner if another supervisor holds one.
        """
        replies = {name: self._hold_for(name, NAME_LEASE_MS) for name in self.names}
        for name, reply in replies.items():
            if not reply:
                raise StaleOwner(f"another worker has the worker name {name!r} now; give each its own --name")
        self._announce(NAME_LEASE_MS, self.names)
        self._report_code(HELD_MS)
        return frozenset(name for name, reply in replies.items() if reply == _DRAIN)

    def release(self) -> None:
        """Release the names."""
        self._report_code(0)
        self._release(self.names)
        self.names = []

    def release_name(self, name: str) -> None:
        """Release one of the names, as its worker has ended for good. May be repeated."""
        self._report_code(0)  # the report names all workers: it is another one without this one
        self._release([name])
        self.names = [one for one in self.names if one != name]
        if self.names:
            self._report_code(HELD_MS)

    def record_end(self, incarnation: str, end: ProcessEnd) -> None:
        """Record in Redis how a process with one of the names has ended."""
        record_end(self._client, self._app, incarnation, end)

    def record_restart(self, restart: Restart) -> None:
        """Record in Redis that a process with one of the names has ended and is started again."""
        record_restart(self._client, self._app, restart)

    def _await_name(self, name: str) -> None:
        # Its last holder may have died a moment ago: then the name expires soon.
        end_ms = self._clock.monotonic_ms() + NAME_LEASE_MS + 1_000
        if self._try_acquire(name):
            return
        logger.warning(
            "the worker name %s is held, by another worker or for one that was killed; waiting for up to %.0f s until it "
            "is free",
            name,
            NAME_LEASE_MS / 1000,
        )
        while not self._try_acquire(name):
            if self._clock.monotonic_ms() >= end_ms:
                raise ConfigError(f"a worker called {name!r} is running; give this one another --name")
            self._clock.sleep_ms(500)

    def _try_acquire(self, name: str) -> bool:
        if name in self.names:
            return True
        if self._hold_for(name, NAME_LEASE_MS):
            self.names.append(name)
            return True
        return False

    def _release(self, names: Sequence[str]) -> None:
        self._announce(0, names)
        for name in names:
            self._hold_for(name, 0)

    def _announce(self, held_ms: int, names: Sequence[str]) -> None:
        self._client.scripts([(HOLD_MEMBERS, (key,), (held_ms, *names)) for key in self._live_keys])

    def _report_code(self, held_ms: int) -> None:
        """Report the code for operators. A worker goes on without the report."""
        try:
            report_code(self._client, self._app, self._handlers, workers=self.names, held_ms=held_ms)
        except RedisError as error:
            logger.debug("cannot report the code of %s: %s; trying again", self._app, error)

    def _hold_for(self, name: str, held_ms: int) -> int:
        """The reply of HOLD_NAME: 0 if another supervisor has the name."""
        keys = (worker_name_key(self._app, name), worker_drain_key(self._app, name))
        return int(self._client.script(HOLD_NAME, keys, (self.token, held_ms)))
