"""The protocol of a balanced service: what its consumers ask Redis, typed. Each call is one atomic step.

Streams are announced as entries of `<service>-input`, in the form of redis-stream-client-go, whose producers may be kept.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from millstream.balancer.notifications import Lease
from millstream.errors import AccessDenied, AlreadyOwned, ConfigError, LeaseLost, NameHeld, StreamNotFound
from millstream.redis_client.client import Arg, Client, Command, Reply, Script, raise_if_error
from millstream.redis_client.key_names import ServiceKeys, check_stream, from_wire, to_wire

HEARTBEAT = Script("leases/heartbeat")
CLAIM_STREAM = Script("leases/claim_stream")
END_LEASES = Script("leases/end_leases")
LEAVE_SERVICE = Script("leases/leave_service")

WAITING = "waiting"
"""The consumer of the group that stands for nobody."""
FIELD = "lbs-input"
_NAME, _INFO = "DataStreamName", "Info"

_HANDLER, _ANNOUNCED = "handler", "announced"

_ROUND_MS = 1_000
_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRequest:
    """What a consumer says of itself in a round. As of BalancerPolicy.

    * `take`: most streams that it takes now; `leaving`: how many it is giving back already
    * `replaces`: another process that has the name, or had it a moment ago, is known to be dead
    * `stuck`, `overran`: leases that are not to be renewed, since the work on them stands still, or since the time to give
      them back is over
    * `wants_all`: ask for all that it has
    """

    lease_ms: int
    weight: float
    limit: int | None
    take: int
    recovers: bool
    leaving: int
    wants_all: bool
    moves: float
    most_losses: int | None
    replaces: bool = False
    stuck: Sequence[Lease] = ()
    overran: Sequence[Lease] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """What a round has found.

    * `born`: tells the service's memory from one that was lost and begun anew; `is_new`: the consumer was not known
    * `next_ms`: when another consumer may be found dead, in milliseconds; None = there is no other
    * `total`, `has`, `share`: streams of the service, of this consumer, and its part
    * `excess`: how many of its streams it is to give back; `more`: there is more to take at once
    * `newest`: ids of the last announcement and the last event
    * `found_lost`: streams that were found without their owner; `late_ms`: how long after their leases had ended, None if
      none had ended by themselves
    * `given`: new leases; `free`: streams to claim; `all`: all that it has, if it asked
    """

    born: str
    is_new: bool
    next_ms: float | None
    total: int
    has: int
    share: int
    excess: int
    more: bool
    newest: tuple[bytes, bytes]
    found_lost: int
    late_ms: int | None
    given: Sequence[Lease]
    free: Sequence[str]
    all: Sequence[Lease]


class Service:
    """The streams of `service`, seen by the consumer `consumer` in its life `incarnation`.

    Every method may be repeated when its reply was lost. All raise RedisError.
    """

    def __init__(self, client: Client, service: str, *, consumer: str, incarnation: str) -> None:
        self.keys = ServiceKeys(service)
        self.consumer = consumer
        self.incarnation = incarnation
        self._client = client

    def round(self, bid: HeartbeatRequest) -> HeartbeatReply:
        """Stay alive and take part. Raises NameHeld while another process has the consumer's name."""
        fixed: list[Arg] = [self.keys.group, self.consumer, self.incarnation, bid.lease_ms, bid.weight, bid.limit or 0]
        fixed += (bid.take, int(bid.recovers), bid.leaving, int(bid.wants_all), _ROUND_MS, bid.moves)
        fixed += (bid.most_losses or 0, int(bid.replaces))
        for why, leases in (("stuck", bid.stuck), ("overran", bid.overran)):
            fixed += [part for lease in leases for part in (to_wire(lease.stream), lease.token, why)]
        reply = self._run(HEARTBEAT, fixed)
        if reply[0] == b"HELD":
            raise NameHeld(
                f"a consumer of {self.keys.label} called {self.consumer!r} is running; give this one another name",
                consumer=self.consumer,
            )
        _, born, is_new, next_ms, total, has, share, excess, more, *rest = reply
        announced, event, found_lost, late_ms, given, free, everything = rest
        return HeartbeatReply(
            born=born.decode(), is_new=bool(is_new), next_ms=None if next_ms < 0 else float(next_ms), total=total, has=has,
            share=share, excess=excess, more=bool(more), newest=(announced, event), found_lost=found_lost,
            late_ms=None if late_ms < 0 else late_ms, given=[*map(_lease, given)], free=[*map(from_wire, free)], all=[*map(_lease, everything)],
        )  # fmt: skip

    def claim(self, stream: str) -> Lease:
        """Take a stream that nobody has. Raises StreamNotFound, AlreadyOwned, LeaseLost if the consumer itself is lost."""
        reply = self._run(CLAIM_STREAM, (self.keys.group, self.consumer, self.incarnation, to_wire(stream)))
        match reply[0]:
            case b"OK":
                return _lease(reply[1])
            case b"OWNED":
                owner = from_wire(reply[1])
                raise AlreadyOwned(f"stream {stream!r} is {owner!r}'s", stream=stream, consumer=owner)
            case b"UNKNOWN":
                raise StreamNotFound(
                    f"stream {stream!r} is not among those of {self.keys.label}: it is not announced, not read yet, or done",
                    stream=stream,
                )
        raise LeaseLost(
            f"{self.consumer!r} was not heard of for too long, and joins again; then claim {stream!r} again",
            stream=stream,
        )

    def hand_in(self, how: Literal["done", "released"], leases: Sequence[Lease]) -> set[str]:
        """End leases; return the streams that were not this consumer's any more, of which nothing was changed."""
        if not leases:
            return set()
        return {*map(from_wire, self._run(END_LEASES, (self.keys.group, self.consumer, how, *_pairs(leases))))}

    def retire(self, how: Literal["released", "expired", "lapsed"] = "released") -> int:
        """Leave; return how many streams others may have now.

        If the leases have ended before: "expired" counts as a loss of their owner, "lapsed" does not, as Redis was away.
        """
        return int(self._run(LEAVE_SERVICE, (self.keys.group, self.consumer, self.incarnation, how)))

    def _run(self, script: Script, args: Sequence[Arg]) -> Reply:
        return self._client.script(script, (self.keys.input, self.keys.meta), args)


def end_leases(client: Client, service: str, how: Literal["done", "released"], streams: Sequence[str]) -> set[str]:
    """End leases whoever has them, as a person may: its owner is told. Return the streams that the service does not know.

    Raises ConfigError, RedisError.
    """
    keys = ServiceKeys(service)
    args: list[Arg] = [part for stream in streams for part in (to_wire(stream), "")]
    return {*map(from_wire, client.script(END_LEASES, (keys.input, keys.meta), (keys.group, "", how, *args)))}


def note_trouble(client: Client, service: str, lease: Lease, why: str | None) -> None:
    """Say for people why its owner cannot work on a stream; None if it can again. It is forgotten with the lease.

    Raises RedisError.
    """
    name, troubles = to_wire(lease.stream), ServiceKeys(service).troubles
    if why is None:
        client.execute("HDEL", troubles, name)
    else:
        client.execute("HSET", troubles, name, to_wire(f"{lease.token} {why}"))


def announce(client: Client, service: str, stream: str, info: object = None) -> str:
    """Announce a stream to the consumers of `service`, with anything that JSON can hold; return the announcement's id.

    While it is not done, to announce it again changes nothing. Raises ConfigError for an empty name or information that
    JSON cannot hold, RedisError.
    """
    return bytes(client.execute(*_announcement(service, stream, info))).decode()


def announce_all(client: Client, service: str, streams: Sequence[str], info: object = None) -> list[str]:
    """Announce streams of which the same is to be said; return the announcements' ids. Raises as `announce` does.

    If one of them cannot be announced, none is.
    """
    found = [_announcement(service, stream, info) for stream in streams]
    return [
        bytes(raise_if_error(reply)).decode()
        for start in range(0, len(found), _AT_ONCE)
        for reply in client.pipeline(found[start : start + _AT_ONCE])
    ]


def service_of(client: Client, label: str) -> str | None:
    """The service whose consumers are the workers of a handler, as far as they have said; None if they have not.

    Raises ConfigError if no handler can have this name, RedisError.
    """
    own = ServiceKeys.of_handler(label)
    announced = client.execute("HGET", own.meta, _ANNOUNCED)
    if announced is not None:
        return from_wire(announced)
    return own.service if client.execute("EXISTS", own.input) else None


def note_workers(client: Client, service: str, label: str) -> str:
    """Note that the consumers of a service are the workers of this handler; return of which they are. Raises RedisError."""
    keys, own = ServiceKeys(service), ServiceKeys.of_handler(label)
    known, elsewhere = client.execute("HMGET", keys.meta, _HANDLER, _ANNOUNCED)
    if elsewhere is not None:
        client.execute("HDEL", keys.meta, _ANNOUNCED)  # the handler has a service of its own now
    if known is None:
        client.execute("HSETNX", keys.meta, _HANDLER, label)
        known = client.execute("HGET", keys.meta, _HANDLER) or to_wire(label)
    if from_wire(known) == label and service != own.service:
        with suppress(AccessDenied):  # people are told less, and that is all
            if client.execute("HGET", own.meta, _ANNOUNCED) != service.encode():
                client.execute("HSET", own.meta, _ANNOUNCED, service)
    return from_wire(known)


def claim_service(client: Client, service: str, label: str) -> None:
    """Note that a service is that of this handler. Raises ConfigError if it is another's, RedisError."""
    known = note_workers(client, service, label)
    if known != label:
        raise ConfigError(
            f"the streams of service {service!r} are shared by the workers of {known}: give {label} a service of its own, "
            f"or, if {known} is no more, HDEL {ServiceKeys(service).meta} handler"
        )


def _announcement(service: str, stream: str, info: object) -> Command:
    if not stream:
        raise ConfigError("a stream that is announced must have a name")
    check_stream(stream)
    if stream == ServiceKeys(service).input:
        raise ConfigError(f"{stream!r} is where the streams of {service!r} are announced; it cannot be one of them")
    try:
        text = to_wire(json.dumps({_NAME: stream, _INFO: info}, ensure_ascii=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the information on stream {stream!r} cannot be announced: {error}") from error
    return ("XADD", ServiceKeys(service).input, "*", FIELD, text)


def _pairs(leases: Sequence[Lease]) -> list[Arg]:
    return [part for lease in leases for part in (to_wire(lease.stream), lease.token)]


def _lease(reply: Sequence[Any]) -> Lease:
    stream, token, announced, items, losses = reply
    fields = dict(zip(items[::2], items[1::2], strict=True))
    try:
        info = json.loads(fields.get(FIELD.encode(), b"null"))[_INFO]
    except (ValueError, TypeError, KeyError, RecursionError):
        info = None  # the stream is known, which is what counts
    return Lease(
        stream=from_wire(stream), token=int(token), info=info, announced=announced.decode(), losses=int(losses)
    )
