"""LeaseTable: the leases of one consumer, and the rules by which they begin and end. No I/O, no lock, no thread.

The Balancer calls Redis, and passes in replies and times; the table returns the changes, in order.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from millstream.balancer.notifications import DisownCause, Lease, StreamAdded, StreamDisowned, StreamExpired

if TYPE_CHECKING:
    from millstream.balancer.protocol import HeartbeatReply

How = DisownCause | Literal["released", "done", "refused", "closed"]
"""How a lease ends: for one of the reasons of StreamDisowned, by the program's own call ("refused" if another consumer
may own the stream already), or with the consumer."""


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease with its local limits. Times are milliseconds of the clock that the caller uses.

    * `deadline_ms`: without progress until then, the work on the stream is stuck
    * `revoke_at_ms`: the lease was revoked, and ends then
    """

    lease: Lease
    since_ms: float
    deadline_ms: float | None = None
    revoke_at_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded:
    """A lease is no longer in the table, `held_ms` milliseconds after it came."""

    lease: Lease
    how: How
    held_ms: float


Change = LeaseEnded | StreamAdded | StreamDisowned | StreamExpired
"""One change: a lease that ended, or a notification to the program."""


class UnrenewedLeases(NamedTuple):
    """Leases that a heartbeat must not renew: past the deadline for progress, or past the time to release them."""

    stuck: Sequence[HeldLease] = ()
    overran: Sequence[HeldLease] = ()


class LeaseTable:
    """The leases that a consumer may rely on, and those it has just lost.

    Calls that change the table must not overlap, with each other or with the request whose reply they apply; `expect`,
    and methods that only read, may be called at any time. `now_ms` is the time of the call, `sent_ms` the time at which
    the request was sent: a lease counts from there, since Redis may have renewed it at once.

    * `lease_ms`: milliseconds after a heartbeat at which the leases expire
    * `drain_ms`: milliseconds after which a revoked lease is no longer renewed
    """

    def __init__(self, *, lease_ms: float, drain_ms: int) -> None:
        self._lease_ms = lease_ms
        self._drain_ms = drain_ms
        self._held: dict[str, HeldLease] = {}
        self._lost: list[Lease] = []  # lost since the last heartbeat: Redis may have forgotten them
        self._created: str | None = None
        self._sent_ms = 0.0
        self._is_uncertain = False  # a call failed, and may have been executed
        self._announced_unassigned_ms: dict[str, float] = {}
        self.valid_until_ms = 0.0
        """When all leases expire; 0 before the first heartbeat, and while the consumer rejoins."""
        self.requests_all = False
        """True if Redis may have other leases: the next heartbeat has to request all of them."""

    # Reading the table

    def __len__(self) -> int:
        return len(self._held)

    def is_valid(self, now_ms: float) -> bool:
        """True if the leases have not expired by the local clock."""
        return now_ms < self.valid_until_ms

    def has_lapsed(self, now_ms: float) -> bool:
        """True if the leases were valid once, and have expired since."""
        return bool(self.valid_until_ms) and not self.is_valid(now_ms)

    def lease(self, stream: str, now_ms: float) -> Lease | None:
        """The lease on a stream, if it is valid."""
        held = self._held.get(stream)
        return held.lease if held is not None and self.is_valid(now_ms) else None

    def leases(self, now_ms: float) -> list[Lease]:
        """All valid leases."""
        return [held.lease for held in self._all()] if self.is_valid(now_ms) else []

    def held(self, streams: Sequence[str | Lease]) -> tuple[list[Lease], list[str]]:
        """The held leases among `streams`, valid or not, and the names of the others.

        A stream given as a lease is held under that lease's token only.
        """
        ours: dict[str, Lease] = {}
        others: list[str] = []
        for item in streams:
            name = item if isinstance(item, str) else item.stream
            found = self._held.get(name)
            if found is None or (isinstance(item, Lease) and item.token != found.lease.token):
                others.append(name)
            else:
                ours[name] = found.lease
        return list(ours.values()), others

    @property
    def is_new(self) -> bool:
        """True before the first reply."""
        return self._created is None

    @property
    def revoked_count(self) -> int:
        """How many leases are revoked and not released yet."""
        return sum(held.revoke_at_ms is not None for held in self._all())

    @property
    def has_limits(self) -> bool:
        """True if a single lease may end before the others."""
        return any(held.deadline_ms is not None or held.revoke_at_ms is not None for held in self._all())

    def end_reason(self, now_ms: float) -> Literal["released", "expired", "lapsed"]:
        """The reason under which the leases end if the consumer leaves now: "lapsed" if Redis was unavailable."""
        if not self.has_lapsed(now_ms):
            return "released"
        return "lapsed" if self._is_uncertain else "expired"

    # Heartbeats

    def expired(self, now_ms: float) -> UnrenewedLeases:
        """The leases that the next heartbeat must not renew."""
        stuck = [held for held in self._all() if _is_past(held.deadline_ms, now_ms)]
        overran = [
            held
            for held in self._all()
            if _is_past(held.revoke_at_ms, now_ms) and not _is_past(held.deadline_ms, now_ms)
        ]
        return UnrenewedLeases(stuck, overran)

    def is_state_lost(self, reply: "HeartbeatReply") -> bool:
        """True if Redis lost the state of the service, with the streams of `recent_leases`: announce these first."""
        return self._created not in (None, reply.created) and (reply.is_new or self.requests_all)

    @property
    def recent_leases(self) -> list[Lease]:
        """The leases that were lost since the last heartbeat, and those that are held."""
        return [*self._lost, *(held.lease for held in self._all())]

    def apply(
        self, reply: "HeartbeatReply", unrenewed: UnrenewedLeases, *, sent_ms: float, now_ms: float
    ) -> list[Change]:
        """Apply the reply to a heartbeat that did not renew `unrenewed`.

        The reply to an older request than the last one changes nothing.
        """
        if sent_ms < self._sent_ms:
            return []
        changes: list[Change] = []
        if self.is_state_lost(reply):
            changes += self.revoke_all("forgotten", now_ms)
        elif reply.is_new:  # Redis has evicted the consumer
            changes += self.revoke_all("expired", now_ms)
        for held in (*unrenewed.stuck, *unrenewed.overran):
            if self._held.get(held.lease.stream) is held:
                changes += self._revoke(held, "stuck", now_ms)
        added: Sequence[Lease] = reply.added
        if self.requests_all and not reply.is_new:
            tokens = {lease.stream: lease.token for lease in reply.all_held}
            for held in self._all():
                if tokens.get(held.lease.stream) != held.lease.token:
                    changes += self._revoke(held, "forgotten" if self._is_uncertain else "taken away", now_ms)
            added = [lease for lease in reply.all_held if lease.stream not in self._held]  # those of lost replies, too
        for lease in added:
            if lease.stream in self._held:  # the same heartbeat has ended the lease before
                changes += self._revoke(self._held[lease.stream], "taken away", now_ms)
            self._held[lease.stream] = HeldLease(lease, now_ms)
            changes.append(StreamAdded(lease=lease))
        self._lost.clear()
        self._created, self._sent_ms = reply.created, sent_ms
        self.valid_until_ms = sent_ms + self._lease_ms
        self._is_uncertain = False
        self.requests_all = reply.held != len(self._held)  # an operator has ended a lease
        return changes

    def mark_uncertain(self) -> None:
        """Record that a call failed and may have been executed: the next heartbeat compares all leases."""
        self.requests_all = self._is_uncertain = True

    def lapse(self, now_ms: float) -> list[Change]:
        """End all leases: they have expired by the local clock."""
        return self.revoke_all("lost contact" if self._is_uncertain else "expired", now_ms)

    def rejoin(self) -> None:
        """Record that the consumer has left the service, and joins it with the next heartbeat."""
        self.valid_until_ms = 0.0

    # Changes beside heartbeats

    def add_claimed(self, lease: Lease, now_ms: float) -> None:
        """Add a lease that the program has claimed, unless it is there already."""
        self._announced_unassigned_ms.pop(lease.stream, None)
        known = self._held.get(lease.stream)
        if known is None or known.lease.token != lease.token:
            self._held[lease.stream] = HeldLease(lease, now_ms)

    def expect(self, stream: str, within_ms: float | None, now_ms: float) -> None:
        """Set the deadline for progress on a stream; None removes it. Ignored for a stream that is not held."""
        held = self._held.get(stream)
        if held is not None:
            held.deadline_ms = None if within_ms is None else now_ms + within_ms

    def end(self, streams: Collection[str], how: How, now_ms: float) -> list[Change]:
        """End the leases on `streams`, all of which are held, without a notification."""
        return [self._remove(self._held[stream], how, now_ms) for stream in streams]

    def end_all(self, how: How, now_ms: float) -> list[Change]:
        """End all leases, without a notification."""
        return self.end(list(self._held), how, now_ms)

    def not_revoked(self, leases: Sequence[Lease]) -> list[Lease]:
        """Those of `leases` that are held and not revoked, in the order in which they came."""
        tokens = {(lease.stream, lease.token) for lease in leases}
        kept = [held.lease for held in self._all() if held.revoke_at_ms is None]
        return [lease for lease in kept if (lease.stream, lease.token) in tokens]

    def revoke_excess(self, count: int, now_ms: float) -> list[Change]:
        """Revoke `count` leases for balance: they stay valid for `drain_ms`, so that the program can finish its work.

        It revokes the newest ones first, and those with a deadline for progress last: the program works on their streams.
        """
        kept = [held for held in reversed(self._all()) if held.revoke_at_ms is None]
        changes: list[Change] = []
        for held in sorted(kept, key=lambda held: held.deadline_ms is not None)[: max(0, count)]:
            held.revoke_at_ms = now_ms + self._drain_ms
            changes.append(StreamDisowned(lease=held.lease, why="rebalanced", drain_ms=self._drain_ms))
        return changes

    def revoke_all(self, why: DisownCause, now_ms: float) -> list[Change]:
        """End all leases, with a notification each."""
        changes: list[Change] = []
        for held in self._all():
            self._lost.append(held.lease)
            changes += self._revoke(held, why, now_ms)
        return changes

    def announce_unassigned(self, unassigned: Sequence[str], room: int, *, sent_ms: float) -> list[Change]:
        """Announce up to `room` unassigned streams, and again those not claimed for the length of a lease."""
        again_ms = sent_ms - self._lease_ms
        before = self._announced_unassigned_ms
        announced_ms = {stream: before.get(stream, float("-inf")) for stream in unassigned}
        due = [stream for stream, at_ms in announced_ms.items() if at_ms <= again_ms][: max(0, room)]
        self._announced_unassigned_ms = announced_ms | dict.fromkeys(due, sent_ms)
        return [StreamExpired(stream=stream) for stream in due]

    def _all(self) -> list[HeldLease]:
        return list(self._held.values())

    def _revoke(self, held: HeldLease, why: DisownCause, now_ms: float) -> list[Change]:
        return [self._remove(held, why, now_ms), StreamDisowned(lease=held.lease, why=why)]

    def _remove(self, held: HeldLease, how: How, now_ms: float) -> LeaseEnded:
        del self._held[held.lease.stream]
        return LeaseEnded(lease=held.lease, how=how, held_ms=now_ms - held.since_ms)


def _is_past(end_ms: float | None, now_ms: float) -> bool:
    return end_ms is not None and end_ms <= now_ms
