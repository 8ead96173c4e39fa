"""The incarnations of worker processes: which are over, and what they died of.

A supervisor starts each process under a name that no other has, and notes in Redis how it ended. So a message is
blamed for the death of a process only where one has died: not where a process was stopped for a while, or had to end
because Redis was away. (The word: A. Das et al., "SWIM", 2002.)
"""

import secrets

import msgspec

from millstream.clock import Clock
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import ended_name, held_name

_KEPT_S = 30 * 24 * 3600
_SLOW_MS = 1_000.0

HELD_MS = 15_000
"""For how long a supervisor has a name after it was last heard of."""


class ProcessEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended. `died`: by itself or by force, with whatever it ran; else it ended for another reason."""

    died: bool
    cause: str


NO_END = ProcessEnd(died=False, cause="lives")
"""Of a process that has not ended."""

_VANISHED = ProcessEnd(died=True, cause="vanished together with its supervisor")


def note_end(client: Client, app: str, incarnation: str, end: ProcessEnd) -> None:
    """Note how a process has ended; that is kept for a month. Raises RedisError."""
    client.execute("SET", ended_name(app, incarnation), msgspec.json.encode(end), "EX", _KEPT_S)


class Incarnation:
    """One life of a worker process, which finds out how others ended.

    * `app`, `consumer`: whose it is, and the worker's name
    * `name`: `<token of its supervisor>-<number>`; "" if it has no supervisor
    """

    def __init__(self, client: Client, clock: Clock, *, app: str, consumer: str, name: str = "") -> None:
        self._client = client
        self._clock = clock
        self._app = app
        self._missed_since_ms: dict[str, float] = {}
        self.mark = f"{name or secrets.token_hex(8)} {consumer}"
        """What it writes beside a message that it runs in isolation."""

    def end_of(self, mark: str) -> ProcessEnd | None:
        """How the process that wrote `mark` ended. None: it is not known yet, ask again. It may live: then it has not died.

        Its supervisor notes the end, and keeps the name until then. Where neither is found for as long as a name lasts,
        both have died: after an outage of Redis a supervisor that lives is back before. Raises RedisError.
        """
        if mark == self.mark:
            return NO_END
        name, _, consumer = mark.partition(" ")
        began_ms = self._clock.monotonic_ms()
        try:
            # The name first: the end is noted before that is let go of.
            holder = self._client.execute("GET", held_name(self._app, consumer))
            ended = self._client.execute("GET", ended_name(self._app, name))
        except RedisError:
            self._missed_since_ms.clear()
            raise
        now_ms = self._clock.monotonic_ms()
        if ended is not None:
            return msgspec.json.decode(ended, type=ProcessEnd)
        if holder is not None and holder.decode() == name.rpartition("-")[0]:
            return NO_END
        if now_ms - began_ms > _SLOW_MS:  # Redis stood still: what was kept there may have run out meanwhile
            self._missed_since_ms.clear()
        since_ms = self._missed_since_ms.setdefault(mark, now_ms)
        return _VANISHED if now_ms - since_ms > HELD_MS else None
