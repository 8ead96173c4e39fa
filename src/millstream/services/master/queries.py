"""What a master shows of the group: who works on which ticket, and who there is. Read from Redis, page by page."""

from bisect import bisect_right
from collections.abc import Sequence

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.key_queues import KeyQueue, look_at, names_of
from millstream.redis_client.client import Client, raise_if_error
from millstream.services.master.delegation import holder_of
from millstream.services.master.registry import Registry
from millstream.services.master.schemas import Consumer, Consumers, Ticket, Tickets
from millstream.services.master.settings import MasterSettings
from millstream.services.web.errors import Refused

_MOST_IDS = 20
_LISTING_MS = 60_000.0
"""For so long a listing of tickets goes on with the names that it has begun with."""
_LOOKED_AT_ONCE, _MOST_LOOKED_AT = 100, 1_000
"""Tickets that are looked at together, and for one page, as many may be done since the listing began."""


class Queries:
    """Pages of what there is, in the order of names. Every method raises RedisError, and Refused for a wrong cursor."""

    def __init__(
        self, client: Client, registry: Registry, settings: MasterSettings, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._client = client
        self._registry = registry
        self._keys = settings.keys
        self._clock = clock
        self._listed: Sequence[bytes] = ()
        self._listed_ms = float("-inf")

    def tickets(self, cursor: str | None, limit: int) -> Tickets:
        """Up to `limit` tickets that have messages which are not done, after those of an earlier page.

        A page may have fewer, or none, where many were done since the listing began; the last has no cursor.
        """
        after = _after(cursor)
        names = self._names(anew=not after)
        at, last = bisect_right(names, after), min(bisect_right(names, after) + _MOST_LOOKED_AT, len(names))
        page: list[KeyQueue] = []
        while at < last and len(page) < limit:
            some = names[at : min(at + max(limit - len(page), _LOOKED_AT_ONCE), last)]
            page += [line for line in look_at(self._client, self._keys, some) if line.length or line.worker]
            at += len(some)
        if len(page) > limit:
            page = page[:limit]
            at = bisect_right(names, page[-1].name)
        ids = self._client.pipeline([("LRANGE", self._keys.line(line.name), 0, _MOST_IDS - 1) for line in page])
        return Tickets(
            tickets=[_ticket(line, raise_if_error(some)) for line, some in zip(page, ids, strict=True)],
            cursor=names[at - 1].hex() if at < len(names) else None,
        )

    def _names(self, *, anew: bool) -> Sequence[bytes]:
        """The names of all lines: those that a listing has begun with, if this master still knows them."""
        now_ms = self._clock.monotonic_ms()
        if anew or now_ms - self._listed_ms > _LISTING_MS:
            self._listed, self._listed_ms = names_of(self._client, self._keys), now_ms
        return self._listed

    def consumers(self, cursor: str | None, limit: int) -> Consumers:
        """Up to `limit` consumers, after those of an earlier page."""
        after = _after(cursor).decode("utf-8", "replace")
        everyone = self._registry.all()
        rest = sorted(name for name in everyone if name > after)
        page = rest[:limit]
        owners = self._client.execute("HGETALL", self._keys.owners)
        lines: dict[str, list[bytes]] = {name: [] for name in page}
        for line, token in zip(owners[::2], owners[1::2], strict=True):
            if (name := holder_of(token)) in lines:
                lines[name].append(line)
        held = [line for some in lines.values() for line in some]
        firsts = self._client.pipeline([("LINDEX", self._keys.line(line), 0) for line in held])
        heads = dict(zip(held, map(raise_if_error, firsts), strict=True))
        shown = []
        for name in page:
            found = everyone[name]
            shown.append(
                Consumer(
                    consumer_name=name, health_url=found.health_url, state=found.state, max_tickets=found.max_tickets,
                    registered_ms=found.registered_ms, healthy_ms=found.healthy_ms,
                    ticket_ids=[_text(line[1:]) for line in lines[name] if line.startswith(b"k")],
                    message_ids=[_text(heads[line]) for line in lines[name] if heads[line] is not None],
                )
            )  # fmt: skip
        return Consumers(consumers=shown, cursor=page[-1].encode().hex() if len(rest) > limit else None)


def _ticket(line: KeyQueue, ids: list[bytes]) -> Ticket:
    return Ticket(
        ticket_id=None if line.key is None else _text(line.key), consumer_name=line.worker, state=line.state,
        why=line.why, messages=line.length, message_ids=[_text(one) for one in ids], since_ms=line.since_ms,
        failed=line.failed,
    )  # fmt: skip


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


def _after(cursor: str | None) -> bytes:
    try:
        return bytes.fromhex(cursor or "")
    except ValueError as error:
        raise Refused(422, "the cursor is none that came with a page") from error
