"""RouterRole: which worker enqueues the entries of a stream that several workers share."""

import contextlib
import secrets
from collections.abc import Collection, Mapping, Sequence

from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import router_session_key
from millstream.redis_client.pipelining import call_all
from millstream.worker.context import WorkerContext
from millstream.worker.static_membership import HOLD_NAME

ROLE_MS = 3_000
"""How long the roles of a worker last after it has last renewed its session, in milliseconds."""
HELD_MS = 600_000
"""How long the role on one stream lasts in Redis, in milliseconds: far longer, as its holder's session decides."""

_GONE = -2
"""The reply of PTTL for a key that does not exist."""


class RouterRole:
    """The role of router, which one worker at a time has on each stream, so that the others need not read all entries.

    The worker keeps all its roles by one session, which it renews every second; three seconds after the last renewal
    other workers take its roles over. So the cost of the roles follows the number of workers, not that of streams.
    Correctness does not depend on there being one router only. Used by one thread.

    `client`: a connection for routing
    """

    def __init__(self, context: WorkerContext, client: Client) -> None:
        self._context = context
        self._client = client
        self._token = secrets.token_hex(8)
        self._due_ms = self._all_due_ms = 0.0
        self._has_session = False
        self._holders: dict[str, str] = {}
        """The token of the holder of each stream whose role was requested."""
        self.held: set[str] = set()
        """The streams on which this worker is the router, as far as it knows; each change makes a new set."""

    def acquire(self, names: Collection[str]) -> None:
        """Acquire the roles on new streams, and every second renew the session and take over the roles of workers that
        have ended. Raises RedisError.

        `names`: the streams of this worker; none leaves before the worker ends
        """
        now_ms = self._context.clock.monotonic_ms()
        is_due = now_ms >= self._due_ms
        if is_due:
            is_renewed = self._renew_session()  # first: what concerns one stream may fail
            self._take_over()
            if not is_renewed or now_ms >= self._all_due_ms:
                self._holders.clear()
                self._all_due_ms = now_ms + HELD_MS / 3
            self._due_ms = now_ms + ROLE_MS / 3
        new = [name for name in names if name not in self._holders]
        if new:
            self._request(new)
        if new or is_due:
            self.held = {name for name, holder in self._holders.items() if holder == self._token}

    def make_due(self) -> None:
        """Request the roles on all streams with the next `acquire`."""
        self._due_ms = self._all_due_ms = 0.0

    def release(self) -> None:
        """Release the roles, so that other workers may acquire them at once; while Redis is unavailable they expire."""
        with contextlib.suppress(Unavailable):
            self._client.execute("DEL", self._session_of(self._token))
            self._end_roles(dict.fromkeys(self.held, self._token))

    def _renew_session(self) -> bool:
        """Renew the session; return False if it is a new one, so that other workers may have taken roles over."""
        session = self._session_of(self._token)
        if self._has_session and self._client.execute("SET", session, 1, "XX", "PX", ROLE_MS) is not None:
            return True
        self._has_session = False  # also if the reply is lost
        self._client.execute("SET", session, 1, "PX", ROLE_MS)
        self._has_session = True
        return False

    def _take_over(self) -> None:
        """End the roles of workers whose session has ended: they are requested next, as those on new streams are."""
        others = sorted({holder for holder in self._holders.values() if holder != self._token})
        left = call_all(self._client, [("PTTL", self._session_of(one)) for one in others])
        gone: set[str] = set()
        for token, left_ms in zip(others, left, strict=True):
            if left_ms == _GONE:
                gone.add(token)
            elif not 0 <= left_ms <= ROLE_MS:  # no worker sets that: the clock went back, with a failover for example
                self._client.execute("PEXPIRE", self._session_of(token), ROLE_MS)
        ended = {name: holder for name, holder in self._holders.items() if holder in gone}
        self._end_roles(ended)
        for name in ended:
            del self._holders[name]

    def _end_roles(self, holders: Mapping[str, str]) -> None:
        """End the role on each of these streams, if its holder still has it."""
        self._client.scripts([(HOLD_NAME, (self._key_of(name),), (holder, 0)) for name, holder in holders.items()])

    def _request(self, names: Sequence[str]) -> None:
        """Acquire the role on each stream that has no router; note who has it on the others."""
        replies = self._client.scripts([(HOLD_NAME, (self._key_of(name),), (self._token, HELD_MS)) for name in names])
        mine = [name for name, is_held in zip(names, replies, strict=True) if is_held]
        others = [name for name, is_held in zip(names, replies, strict=True) if not is_held]
        self._holders |= dict.fromkeys(mine, self._token)
        holders = call_all(self._client, [("GET", self._key_of(name)) for name in others])
        for name, holder in zip(others, holders, strict=True):
            if holder is not None:  # released meanwhile: it is requested with the next `acquire`
                self._holders[name] = holder.decode()

    def _key_of(self, name: str) -> str:
        return self._context.keys_of(name).router

    def _session_of(self, token: str) -> str:
        return router_session_key(self._context.handler.app, self._context.handler.name, token)
