"""EndedSessions: sessions that were logged out before their time, so that each copy of the cookie ends with it.

A session is a signed cookie, which no console can take back. So those that have ended are kept in Redis, where every
console finds them, also one that starts later. Redis holds these and not the valid ones: a login needs no Redis.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from millstream.errors import Unavailable
from millstream.redis_client.key_names import ended_sessions_key
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.resp import Command, Reply
from millstream.services.console.client_pool import ClientPool
from millstream.services.console.live_reads import LiveReads
from millstream.services.console.sessions import Session

_MOST_SESSIONS = 100_000
_KEPT_S = 3_600.0
"""How long a session is kept after its time: the clocks of the machines that run consoles differ."""
_SEEN_S = 60.0


class EndedSessions:
    """The sessions that have ended before their time, the last 100,000 of them. `wall`: Unix seconds.

    `reads` keeps what was read for open pages.
    """

    def __init__(
        self,
        clients: ClientPool,
        *,
        wall: Callable[[], float] = time.time,
        reads: LiveReads[Mapping[bytes, bool]] | None = None,
    ) -> None:
        self._clients = clients
        self._wall = wall
        self._reads = LiveReads[Mapping[bytes, bool]]() if reads is None else reads
        self._seen: dict[bytes, float] = {}
        """The sessions whose pages are open, and when they last asked, in Unix seconds."""

    async def add(self, session: Session) -> None:
        """End a session. Raises RedisError if that cannot be recorded."""
        key = ended_sessions_key()
        await self._call(
            ("ZADD", key, session.until_s, session.id),
            ("ZREMRANGEBYSCORE", key, "-inf", self._wall() - _KEPT_S),
            ("ZREMRANGEBYRANK", key, 0, -_MOST_SESSIONS - 1),
        )
        self._reads.clear()

    async def has(self, session: Session) -> bool:
        """Whether a session has ended. Raises RedisError."""
        return (await self._read([session.id]))[session.id]

    async def had(self, session: Session) -> bool:
        """Whether a session had ended some seconds ago: one command tells it for all open pages. Raises RedisError."""
        self._seen[session.id] = self._wall()
        try:
            known, _ = await self._reads.get("seen", self._read_seen)
        except Unavailable:  # the next request asks again, as `has` does
            self._reads.clear()
            raise
        return known[session.id] if session.id in known else await self.has(session)

    async def _read_seen(self) -> Mapping[bytes, bool]:
        oldest_s = self._wall() - _SEEN_S
        self._seen = {one: at_s for one, at_s in self._seen.items() if at_s >= oldest_s}
        return await self._read(list(self._seen))

    async def _read(self, ids: Sequence[bytes]) -> Mapping[bytes, bool]:
        (found,) = await self._call(("ZMSCORE", ended_sessions_key(), *ids))
        return {one: until_s is not None for one, until_s in zip(ids, found, strict=True)}

    async def _call(self, *commands: Command) -> list[Reply]:
        def call() -> list[Reply]:
            with self._clients.client() as client:
                try:
                    return call_all(client, commands)
                except Unavailable:  # Redis or a proxy may have closed the connection, as it was idle: open another
                    return call_all(client, commands)

        return await self._clients.in_thread(call)
