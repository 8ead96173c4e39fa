"""Queries: the tickets and consumers that a master shows, read from Redis page by page."""

from bisect import bisect_right
from collections.abc import Sequence

from millstream.admin.key_queues import KeyQueue, queue_names, read_queues
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.redis_client.client import Client
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.replies import pairs_of
from millstream.services.master.delegation import holder_of
from millstream.services.master.registry import Registry
from millstream.services.master.schemas import Consumer, ConsumerPage, Ticket, TicketPage
from millstream.services.master.settings import MasterSettings
from millstream.services.web.errors import Refused

_MOST_IDS = 20
_LISTING_MS = 60_000.0
"""A listing of tickets pages through the names found at its start for this long, in milliseconds."""
_READ_AT_ONCE, _MOST_READ = 100, 1_000
"""Tickets read in one round trip, and at most for one page, as many may be done since the listing began."""


class Queries:
    """Pages of tickets and consumers, ordered by name. Methods raise RedisError, and Refused for a wrong cursor."""

    def __init__(
        self, client: Client, registry: Registry, settings: MasterSettings, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._client = client
        self._registry = registry
        self._keys = settings.keys
        self._clock = clock
        self._listing: Sequence[bytes] = ()
        self._listing_ms = float("-inf")

    def tickets(self, cursor: str | None, limit: int) -> TicketPage:
        """Up to `limit` tickets with unfinished messages, after those of the page that `cursor` came with.

        A page may have fewer, or none, if many were done since the listing began. The last page has no cursor.
        """
        after = _after(cursor)
        names = self._queue_names(anew=not after)
        at, last = bisect_right(names, after), min(bisect_right(names, after) + _MOST_READ, len(names))
        page: list[KeyQueue] = []
        while at < last and len(page) < limit:
            some = names[at : min(at + max(limit - len(page), _READ_AT_ONCE), last)]
            page += [queue for queue in read_queues(self._client, self._keys, some) if queue.length or queue.worker]
            at += len(some)
        if len(page) > limit:
            page = page[:limit]
            at = bisect_right(names, page[-1].name)
        ids = call_all(self._client, [("LRANGE", self._keys.queue(queue.name), 0, _MOST_IDS - 1) for queue in page])
        return TicketPage(
            tickets=[_ticket(queue, some) for queue, some in zip(page, ids, strict=True)],
            cursor=names[at - 1].hex() if at < len(names) else None,
        )

    def _queue_names(self, *, anew: bool) -> Sequence[bytes]:
        """The names of all key queues: those at the listing's start, if this master still has them in memory."""
        now_ms = self._clock.monotonic_ms()
        if anew or now_ms - self._listing_ms > _LISTING_MS:
            self._listing, self._listing_ms = queue_names(self._client, self._keys), now_ms
        return self._listing

    def consumers(self, cursor: str | None, limit: int) -> ConsumerPage:
        """Up to `limit` consumers, after those of the page that `cursor` came with."""
        after = _after(cursor).decode("utf-8", "replace")
        registered = self._registry.all()
        rest = sorted(name for name in registered if name > after)
        page = rest[:limit]
        owners = self._client.execute("HGETALL", self._keys.owners)
        queues: dict[str, list[bytes]] = {name: [] for name in page}
        for queue, token in pairs_of(owners):
            if (name := holder_of(token)) in queues:
                queues[name].append(queue)
        held = [queue for some in queues.values() for queue in some]
        firsts = call_all(self._client, [("LINDEX", self._keys.queue(queue), 0) for queue in held])
        heads = dict(zip(held, firsts, strict=True))
        consumers = []
        for name in page:
            found = registered[name]
            consumers.append(
                Consumer(
                    consumer_name=name,
                    health_url=found.health_url,
                    state=found.state,
                    max_tickets=found.max_tickets,
                    registered_ms=found.registered_ms,
                    healthy_ms=found.healthy_ms,
                    ticket_ids=[_text(queue[1:]) for queue in queues[name] if queue.startswith(b"k")],
                    message_ids=[_text(heads[queue]) for queue in queues[name] if heads[queue] is not None],
                )
            )
        return ConsumerPage(consumers=consumers, cursor=page[-1].encode().hex() if len(rest) > limit else None)


def _ticket(queue: KeyQueue, ids: list[bytes]) -> Ticket:
    return Ticket(
        ticket_id=None if queue.key is None else _text(queue.key),
        consumer_name=queue.worker,
        state=queue.state,
        why=queue.why,
        messages=queue.length,
        message_ids=[_text(one) for one in ids],
        since_ms=queue.since_ms,
        failed=queue.failed_attempts,
    )


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


def _after(cursor: str | None) -> bytes:
    try:
        return bytes.fromhex(cursor or "")
    except ValueError as error:
        raise Refused(422, "the cursor is invalid: use the one that came with the page before") from error
