"""Registry: the registered consumers, with their health URLs and states.

They are in one Redis hash, shared by all masters. A change is a compare-and-set, so no master overwrites another's.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from millstream.redis_client.call import Call
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import WAITING, HandlerKeys
from millstream.redis_client.pipelining import server_time_ms
from millstream.redis_client.replies import pairs_of
from millstream.redis_client.resp import Reply
from millstream.redis_client.scripts import Script
from millstream.services.master.settings import NAME_PATTERN
from millstream.services.web.errors import Refused

COMPARE_AND_SET = Script("shared/compare_and_set")

State = Literal["alive", "stuck", "dead"]
"""alive: gets messages. stuck: held one too long; gets none until it finishes one. dead: gets none until healthy."""

EndCause = Literal["unhealthy", "registered"]
"""How an incarnation ended: its health checks failed, or the consumer registered again, as another process."""

MAX_CONSUMERS = 1_000
DEAD_RETENTION_MS = 24 * 3_600_000
"""A consumer that has been dead for this long, in milliseconds, is removed."""

_MOST_ENDED = 4

_NAME = re.compile(NAME_PATTERN)
_RESERVED = (WAITING, "recovered")


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """One consumer.

    * `incarnation`: identifies this registration; part of its lease tokens
    * `instance`: the consumer's own id of its process, if it has one: registering again with the same one is no restart
    * `health_url`: None if it sends heartbeats instead
    * `max_tickets`: messages that it may have at once
    * `registered_ms`, `healthy_ms`: when it registered, and when it was last found healthy, in Unix milliseconds
    * `ended`: how its last incarnations ended, so that the leases they lost are counted for the right cause
    """

    incarnation: str
    health_url: str | None
    max_tickets: int
    registered_ms: int
    healthy_ms: int
    instance: str = ""
    state: State = "alive"
    ended: dict[str, EndCause] = {}

    def end_incarnation(self, cause: EndCause) -> dict[str, EndCause]:
        """The next value of `ended`, with the end of this incarnation; only the last ones are kept."""
        ended = {**self.ended, self.incarnation: cause}
        return dict(list(ended.items())[-_MOST_ENDED:])


Change = Callable[[Registration | None, int], Registration | None]
"""From the current registration and the server's time, in Unix milliseconds, to the new registration; None: remove."""

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(Registration).decode


class Registry:
    """The consumers of one group. Every method raises RedisError. Threads may share it as they may share its client."""

    def __init__(self, client: Client, keys: HandlerKeys) -> None:
        self._client = client
        self._key = keys.consumers

    def all(self) -> dict[str, Registration]:
        """All consumers, by name."""
        found = self._client.execute("HGETALL", self._key)
        return {name.decode(): _decode(text) for name, text in pairs_of(found)}

    def get(self, name: str) -> Registration | None:
        """One consumer, or None if it is not registered."""
        found = self._client.execute("HGET", self._key, name)
        return None if found is None else _decode(found)

    def get_call(self, names: Sequence[str]) -> Call[dict[str, Registration]]:
        """The call that reads some consumers. Its result: those of them that are registered."""

        def parse(reply: Reply) -> dict[str, Registration]:
            found = zip(names, reply, strict=True)
            return {name: _decode(text) for name, text in found if text is not None}

        return Call(("HMGET", self._key, *names), parse)

    def register(
        self, name: str, *, health_url: str | None, max_tickets: int, instance: str, silent_ms: int
    ) -> Registration:
        """Register a consumer: a new incarnation, or the current one if `instance` is the same.

        Raises Refused for an invalid name, for a name whose consumer is alive at another health URL (healthy within
        twice `silent_ms`), and for too many consumers.
        """
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise Refused(422, f"invalid consumer name {name!r}: use 1 to 100 letters, digits and any of _ . : @ -")

        def change(now: Registration | None, time_ms: int) -> Registration:
            again = now is not None and bool(instance) and now.instance == instance
            if now is None and self._client.execute("HLEN", self._key) >= MAX_CONSUMERS:
                raise Refused(429, f"there are {MAX_CONSUMERS:,} consumers already, which is the limit")
            alive = now is not None and now.state != "dead" and time_ms - now.healthy_ms < 2 * silent_ms
            if now is not None and alive and not again and now.health_url != health_url:
                raise Refused(
                    409,
                    f"a consumer called {name!r} is alive at another health URL; give this one another name, or wait",
                )
            ended = {} if now is None else now.ended if again else now.end_incarnation("registered")
            return Registration(
                incarnation=now.incarnation if now is not None and again else secrets.token_hex(4),
                instance=instance,
                health_url=health_url,
                max_tickets=max_tickets,
                registered_ms=time_ms,
                healthy_ms=time_ms,
                ended=ended,
            )

        found = self._update(name, change)
        assert found is not None
        return found

    def record_success(self, name: str, incarnation: str, *, every_ms: int) -> None:
        """Record that a consumer is healthy, at most once per `every_ms`."""

        def change(now: Registration | None, time_ms: int) -> Registration | None:
            if now is None or now.incarnation != incarnation:
                return now
            if now.state != "dead" and time_ms - now.healthy_ms < every_ms:
                return now
            state: State = "alive" if now.state == "dead" else now.state
            return msgspec.structs.replace(now, healthy_ms=time_ms, state=state)

        self._update(name, change)

    def record_failure(self, name: str, incarnation: str, *, silent_ms: int) -> bool:
        """Record a failed check: a consumer not healthy for `silent_ms` becomes dead, which ends its leases.

        True if it became dead by this call.
        """

        def change(now: Registration | None, time_ms: int) -> Registration | None:
            if now is None or now.incarnation != incarnation or time_ms - now.healthy_ms < silent_ms:
                return now
            if now.state == "dead":
                return None if time_ms - now.healthy_ms > DEAD_RETENTION_MS else now
            ended = now.end_incarnation("unhealthy")
            return msgspec.structs.replace(now, state="dead", incarnation=secrets.token_hex(4), ended=ended)

        found = self._update(name, change)
        return found is not None and found.state == "dead" and found.incarnation != incarnation

    def set_state(self, name: str, state: Literal["alive", "stuck"]) -> None:
        """Set the state of a consumer that held a message too long, or that has finished one after all."""

        def change(now: Registration | None, _: int) -> Registration | None:
            if now is None or now.state in ("dead", state):
                return now
            return msgspec.structs.replace(now, state=state)

        self._update(name, change)

    def stop_assigning(self, name: str) -> None:
        """Assign no more messages to a consumer."""
        self._update(name, lambda now, time_ms: now and msgspec.structs.replace(now, max_tickets=0))

    def unregister(self, name: str) -> None:
        """Remove a consumer."""
        self._update(name, lambda now, time_ms: None)

    def _update(self, name: str, change: Change) -> Registration | None:
        while True:
            before = self._client.execute("HGET", self._key, name)
            known = None if before is None else _decode(before)
            after = change(known, server_time_ms(self._client))
            if after == known:
                return known
            new = b"" if after is None else _encode(after)
            if self._client.script(COMPARE_AND_SET, (self._key,), (name, before or b"", new)):
                return after
