"""Protocol of a balanced service: the typed calls of its consumers to Redis. Each call is one atomic step.

Streams are announced as entries of `<service>-input`, in the format of redis-stream-client-go, so its producers work
unchanged.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from millstream.balancer.notifications import Lease
from millstream.errors import AccessDenied, AlreadyOwned, ConfigError, LeaseLost, NameHeld, StreamNotFound
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import ServiceKeys, check_stream, from_wire, to_wire
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Arg, Command, Reply
from millstream.redis_client.scripts import Script

HEARTBEAT = Script("leases/heartbeat")
CLAIM_STREAM = Script("leases/claim_stream")
END_LEASES = Script("leases/end_leases")
LEAVE_SERVICE = Script("leases/leave_service")

UNASSIGNED = "unassigned"
"""The consumer of the group that has the announcements of streams without an owner."""
ANNOUNCEMENT_FIELD = "lbs-input"
_NAME, _INFO = "DataStreamName", "Info"

_HANDLER, _ANNOUNCED = "handler", "announced"

_MOVES_PERIOD_MS = 1_000
_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRequest:
    """One heartbeat of a consumer. Fields of the same name are as in BalancerPolicy.

    * `max_new`: the most streams to assign now; `releasing`: how many it is releasing already
    * `replaces`: the previous process of this name is known to be dead
    * `stuck`, `overran`: leases not to be renewed: without progress, or past the time to release them
    * `requests_all`: request all leases of the consumer
    """

    lease_ms: int
    weight: float
    limit: int | None
    max_new: int
    recovers: bool
    releasing: int
    requests_all: bool
    moves: float
    max_losses: int | None
    replaces: bool = False
    stuck: Sequence[Lease] = ()
    overran: Sequence[Lease] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """The reply to a heartbeat.

    * `created`: identifies the state of the service in Redis: it changes if that was lost; `is_new`: the consumer was
      unknown
    * `next_expiry_ms`: milliseconds until the leases of another consumer may expire; None = there is no other
    * `total`, `held`, `share`: streams of the service, those of this consumer, and its share
    * `excess`: how many streams it must release; `has_more`: there are more streams to lease at once
    * `newest_ids`: ids of the last announcement and the last event
    * `owner_losses`: streams found without their owner; `recovery_ms`: milliseconds since their leases expired, None if
      none had expired
    * `added`: new leases; `unassigned`: streams without an owner; `all_held`: all leases of the consumer, if requested
    """

    created: str
    is_new: bool
    next_expiry_ms: float | None
    total: int
    held: int
    share: int
    excess: int
    has_more: bool
    newest_ids: tuple[bytes, bytes]
    owner_losses: int
    recovery_ms: int | None
    added: Sequence[Lease]
    unassigned: Sequence[str]
    all_held: Sequence[Lease]


class Service:
    """The streams of `service`, as seen by the consumer `consumer` in its incarnation `incarnation`.

    Every method may be repeated when its reply was lost. All raise RedisError.
    """

    def __init__(self, client: Client, service: str, *, consumer: str, incarnation: str) -> None:
        self.keys = ServiceKeys(service)
        self.consumer = consumer
        self.incarnation = incarnation
        self._client = client

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Send a heartbeat. Raises NameHeld while another process has the consumer's name."""
        fixed: list[Arg] = [
            self.keys.group,
            self.consumer,
            self.incarnation,
            request.lease_ms,
            request.weight,
            request.limit or 0,
        ]
        fixed += (
            request.max_new,
            int(request.recovers),
            request.releasing,
            int(request.requests_all),
            _MOVES_PERIOD_MS,
            request.moves,
        )
        fixed += (request.max_losses or 0, int(request.replaces))
        for why, leases in (("stuck", request.stuck), ("overran", request.overran)):
            fixed += [part for lease in leases for part in (to_wire(lease.stream), lease.token, why)]
        reply = self._run(HEARTBEAT, fixed)
        if reply[0] == b"HELD":
            raise NameHeld(
                f"a consumer of {self.keys.label} called {self.consumer!r} is running; give this one another name",
                consumer=self.consumer,
            )
        _, created, is_new, next_ms, total, held, share, excess, more, *others = reply
        announced, event, owner_losses, recovery_ms, added, unassigned, all_held = others
        return HeartbeatReply(
            created=created.decode(),
            is_new=bool(is_new),
            next_expiry_ms=None if next_ms < 0 else float(next_ms),
            total=total,
            held=held,
            share=share,
            excess=excess,
            has_more=bool(more),
            newest_ids=(announced, event),
            owner_losses=owner_losses,
            recovery_ms=None if recovery_ms < 0 else recovery_ms,
            added=[*map(_lease, added)],
            unassigned=[*map(from_wire, unassigned)],
            all_held=[*map(_lease, all_held)],
        )

    def claim(self, stream: str) -> Lease:
        """Lease a stream without an owner.

        Raises StreamNotFound, AlreadyOwned, LeaseLost if the consumer itself was evicted.
        """
        reply = self._run(CLAIM_STREAM, (self.keys.group, self.consumer, self.incarnation, to_wire(stream)))
        match reply[0]:
            case b"OK":
                return _lease(reply[1])
            case b"OWNED":
                owner = from_wire(reply[1])
                raise AlreadyOwned(f"consumer {owner!r} owns stream {stream!r}", stream=stream, consumer=owner)
            case b"UNKNOWN":
                raise StreamNotFound(
                    f"{self.keys.label} has no stream {stream!r}: it is not announced, its announcement is unread, "
                    "or it is done",
                    stream=stream,
                )
        raise LeaseLost(
            f"{self.consumer!r} sent no heartbeat for too long and is rejoining; claim {stream!r} again after that",
            stream=stream,
        )

    def end_leases(self, how: Literal["done", "released"], leases: Sequence[Lease]) -> set[str]:
        """End leases; return the streams that this consumer no longer owns, which are left unchanged."""
        if not leases:
            return set()
        return {*map(from_wire, self._run(END_LEASES, (self.keys.group, self.consumer, how, *_pairs(leases))))}

    def leave(self, how: Literal["released", "expired", "lapsed"] = "released") -> int:
        """Leave the service; return how many streams were released.

        If the leases have expired before: "expired" counts as a loss of their owner; "lapsed" does not, as Redis was
        unavailable.
        """
        return int(self._run(LEAVE_SERVICE, (self.keys.group, self.consumer, self.incarnation, how)))

    def _run(self, script: Script, args: Sequence[Arg]) -> Reply:
        return self._client.script(script, (self.keys.input, self.keys.meta), args)


def end_leases(client: Client, service: str, how: Literal["done", "released"], streams: Sequence[str]) -> set[str]:
    """End leases of any owner, on behalf of an operator; each owner is notified.

    Return the streams unknown to the service. Raises ConfigError, RedisError.
    """
    keys = ServiceKeys(service)
    args: list[Arg] = [part for stream in streams for part in (to_wire(stream), "")]
    return {*map(from_wire, client.script(END_LEASES, (keys.input, keys.meta), (keys.group, "", how, *args)))}


def record_stream_error(client: Client, service: str, lease: Lease, why: str | None) -> None:
    """Record why the owner cannot work on a stream, for operators; None clears it. The end of the lease clears it too.

    Raises RedisError.
    """
    name, troubles = to_wire(lease.stream), ServiceKeys(service).stream_errors
    if why is None:
        client.execute("HDEL", troubles, name)
    else:
        client.execute("HSET", troubles, name, to_wire(f"{lease.token} {why}"))


def announce(client: Client, service: str, stream: str, info: object = None) -> str:
    """Announce a stream to the consumers of `service`; return the id of the announcement.

    `info`: any JSON value. Announcing a stream again before it is done changes nothing. Raises ConfigError for an empty
    name or an info that is not JSON, RedisError.
    """
    return bytes(client.execute(*_announcement(service, stream, info))).decode()


def announce_all(client: Client, service: str, streams: Sequence[str], info: object = None) -> list[str]:
    """Announce streams with the same info; return the ids of the announcements. Raises as `announce` does.

    If one of them cannot be announced, none is.
    """
    announcements = [_announcement(service, stream, info) for stream in streams]
    return [
        bytes(raise_if_error(reply)).decode()
        for start in range(0, len(announcements), _AT_ONCE)
        for reply in client.pipeline(announcements[start : start + _AT_ONCE])
    ]


def announced_streams(client: Client, service: str) -> list[str]:
    """Return the streams of `service`: announced, read by a consumer, and not done. Raises RedisError."""
    return sorted(from_wire(name) for name in client.execute("HKEYS", ServiceKeys(service).streams))


def service_of(client: Client, label: str) -> str | None:
    """The service whose consumers are the workers of a handler, as these have recorded it; None if they have not.

    Raises ConfigError if the name is not valid for a handler, RedisError.
    """
    own = ServiceKeys.of_handler(label)
    announced = client.execute("HGET", own.meta, _ANNOUNCED)
    if announced is not None:
        return from_wire(announced)
    return own.service if client.execute("EXISTS", own.input) else None


def record_workers(client: Client, service: str, label: str) -> str:
    """Record that the consumers of a service are the workers of this handler; return the recorded handler.

    Raises RedisError.
    """
    keys, own = ServiceKeys(service), ServiceKeys.of_handler(label)
    known, other_service = client.execute("HMGET", keys.meta, _HANDLER, _ANNOUNCED)
    if other_service is not None:
        client.execute("HDEL", keys.meta, _ANNOUNCED)  # the handler has a service of its own now
    if known is None:
        client.execute("HSETNX", keys.meta, _HANDLER, label)
        known = client.execute("HGET", keys.meta, _HANDLER) or to_wire(label)
    if from_wire(known) == label and service != own.service:
        with suppress(AccessDenied):  # operators see less, and nothing else changes
            if client.execute("HGET", own.meta, _ANNOUNCED) != service.encode():
                client.execute("HSET", own.meta, _ANNOUNCED, service)
    return from_wire(known)


def disown_service(client: Client, label: str) -> None:
    """Remove the record that the consumers of a service with a name of its own are this handler's workers.

    Raises RedisError.
    """
    service = service_of(client, label)
    if service is not None and service != ServiceKeys.of_handler(label).service:
        meta = ServiceKeys(service).meta
        if client.execute("HGET", meta, _HANDLER) == to_wire(label):
            client.execute("HDEL", meta, _HANDLER)


def claim_service(client: Client, service: str, label: str) -> None:
    """Record that a service belongs to this handler. Raises ConfigError if it is another's, RedisError."""
    known = record_workers(client, service, label)
    if known != label:
        raise ConfigError(
            f"the workers of {known} own the streams of service {service!r}: give {label} a service of its own, "
            f"or, if {known} no longer exists, HDEL {ServiceKeys(service).meta} handler"
        )


def _announcement(service: str, stream: str, info: object) -> Command:
    if not stream:
        raise ConfigError("an announced stream must have a name")
    check_stream(stream)
    if stream == ServiceKeys(service).input:
        raise ConfigError(
            f"{stream!r} holds the announcements of {service!r} and cannot be announced; use another stream"
        )
    try:
        text = to_wire(json.dumps({_NAME: stream, _INFO: info}, ensure_ascii=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the info of stream {stream!r} is not JSON: {error}") from error
    return ("XADD", ServiceKeys(service).input, "*", ANNOUNCEMENT_FIELD, text)


def _pairs(leases: Sequence[Lease]) -> list[Arg]:
    return [part for lease in leases for part in (to_wire(lease.stream), lease.token)]


def _lease(reply: Sequence[Any]) -> Lease:
    stream, token, announced, items, losses = reply
    fields = mapping_of(items)
    try:
        info = json.loads(fields.get(ANNOUNCEMENT_FIELD.encode(), b"null"))[_INFO]
    except (ValueError, TypeError, KeyError, RecursionError):
        info = None  # the lease is valid without it
    return Lease(
        stream=from_wire(stream), token=int(token), info=info, announced=announced.decode(), losses=int(losses)
    )
