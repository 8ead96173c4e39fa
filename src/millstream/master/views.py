"""What a master shows of the group: who works on which ticket, and who there is. Read from Redis, page by page."""

from millstream.client import Client, raise_if_error
from millstream.lines import Line, survey
from millstream.master.bodies import Consumer, Consumers, Ticket, Tickets
from millstream.master.desk import holder_of
from millstream.master.registry import Registry
from millstream.master.settings import MasterSettings
from millstream.web.refusal import Refused

_MOST_IDS = 20


class Views:
    """Pages of what there is, in the order of names. Every method raises RedisError, and Refused for a wrong cursor."""

    def __init__(self, client: Client, registry: Registry, settings: MasterSettings) -> None:
        self._client = client
        self._registry = registry
        self._keys = settings.keys

    def tickets(self, cursor: str | None, limit: int) -> Tickets:
        """Up to `limit` tickets that have messages which are not done, after those of an earlier page."""
        after = _after(cursor)
        found = sorted(survey(self._client, self._keys), key=lambda line: line.name)
        rest = [line for line in found if line.name > after and (line.length or line.worker)]
        page = rest[:limit]
        ids = self._client.pipeline([("LRANGE", self._keys.line(line.name), 0, _MOST_IDS - 1) for line in page])
        return Tickets(
            tickets=[_ticket(line, raise_if_error(some)) for line, some in zip(page, ids, strict=True)],
            cursor=page[-1].name.hex() if len(rest) > limit else None,
        )

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
        shown = []
        for name in page:
            found = everyone[name]
            heads = self._client.pipeline([("LINDEX", self._keys.line(line), 0) for line in lines[name]])
            shown.append(
                Consumer(
                    consumer_name=name, health_url=found.health_url, state=found.state, max_tickets=found.max_tickets,
                    registered_ms=found.registered_ms, healthy_ms=found.healthy_ms,
                    ticket_ids=[_text(line[1:]) for line in lines[name] if line.startswith(b"k")],
                    message_ids=[_text(head) for head in heads if isinstance(head, bytes)],
                )
            )  # fmt: skip
        return Consumers(consumers=shown, cursor=page[-1].encode().hex() if len(rest) > limit else None)


def _ticket(line: Line, ids: list[bytes]) -> Ticket:
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
