"""Incarnations of worker processes: which have ended, and how.

A supervisor starts each process under a unique name, and records in Redis how it ended. So only the crash of a process
counts against a message: not a pause of the process, nor its end because Redis was unavailable. (The term: A. Das et
al., "SWIM", 2002.)
"""

import secrets

import msgspec

from millstream.clock import Clock
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import ended_process_key, worker_name_key

_KEPT_S = 30 * 24 * 3600
_SLOW_MS = 1_000.0

NAME_LEASE_MS = 15_000
"""How long a supervisor holds a name after its last renewal, in milliseconds."""


class ProcessEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended.

    * `died`: it crashed or was killed, with its running messages; False for any other end
    * `certain`: False if it may have been paused instead
    """

    died: bool
    cause: str
    certain: bool = True


ALIVE = ProcessEnd(died=False, cause="lives")
"""The end of a process that is alive."""

_VANISHED = ProcessEnd(died=True, cause="vanished together with its supervisor")
_SILENT = ProcessEnd(died=True, certain=False, cause="had no supervisor: it died, or was paused for long")


def record_end(client: Client, app: str, incarnation: str, end: ProcessEnd) -> None:
    """Record how a process has ended, for 30 days. Raises RedisError."""
    client.execute("SET", ended_process_key(app, incarnation), msgspec.json.encode(end), "EX", _KEPT_S)


class Incarnation:
    """One incarnation of a worker process; finds out how others ended.

    * `app`, `consumer`: the app, and the worker's name
    * `name`: `<token of its supervisor>-<number>`; "" without a supervisor
    """

    def __init__(self, client: Client, clock: Clock, *, app: str, consumer: str, name: str = "") -> None:
        self._client = client
        self._clock = clock
        self._app = app
        self._missing_since_ms: dict[str, float] = {}
        self.mark = f"{name or secrets.token_hex(8)} {consumer}"
        """Its isolation mark: the text that it stores for a message that it runs in isolation."""

    def end_of(self, mark: str) -> ProcessEnd | None:
        """Return how the process that wrote `mark` ended: `ALIVE` if it lives on, None if that is not known yet.

        Its supervisor records the end, and holds the name until then. If neither record nor name exists for as long as
        a name lasts, both have died: after an outage of Redis a living supervisor renews its name sooner. Raises
        RedisError.

        Nothing in Redis shows whether a process without a supervisor lives: its end is never certain.
        """
        if mark == self.mark:
            return ALIVE
        name, _, consumer = mark.partition(" ")
        began_ms = self._clock.monotonic_ms()
        try:
            # The name first: its supervisor records the end before it releases the name.
            holder = self._client.execute("GET", worker_name_key(self._app, consumer))
            ended = self._client.execute("GET", ended_process_key(self._app, name))
        except RedisError:
            self._missing_since_ms.clear()
            raise
        now_ms = self._clock.monotonic_ms()
        if ended is not None:
            return msgspec.json.decode(ended, type=ProcessEnd)
        if holder is not None and holder.decode() == name.rpartition("-")[0]:
            return ALIVE
        if now_ms - began_ms > _SLOW_MS:  # Redis hung, and names may have expired meanwhile
            self._missing_since_ms.clear()
        since_ms = self._missing_since_ms.setdefault(mark, now_ms)
        if now_ms - since_ms <= NAME_LEASE_MS:
            return None
        return _VANISHED if "-" in name else _SILENT
