"""The protocol of a balanced service under any order of steps, on a real Redis: what holds after each, and at the end."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from millstream.balancer import Lease
from millstream.balancer.protocol import HeartbeatReply, Service, announce
from millstream.errors import AlreadyOwned, LeaseLost, NameHeld, StreamNotFound
from millstream.redis_client.client import Client
from tests.support.balancers import (
    KEYS,
    LONG_MS,
    SERVICE,
    add_raw,
    dead,
    expire,
    heartbeat_request,
    owners,
    peer,
    pending,
    server_us,
    unassigned,
)

pytestmark = [pytest.mark.balancer]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
EXAMPLES, STEPS = (2_000, 80) if SOAK else (40, 40)

NAMES = ["c0", "c1", "c2"]
STREAMS = [f"s{n}" for n in range(8)]
CONSUMER = st.sampled_from(NAMES)
STREAM = st.sampled_from(STREAMS)
FEW = st.integers(0, 4)
ANY = st.integers(0, 1_000)


class BalancerMachine(RuleBasedStateMachine):
    """Three consumers that may miss replies, be slow or limited, die and start again, and producers good and bad."""

    client: ClassVar[Client]

    @initialize()
    def begin(self) -> None:
        self.client.execute("FLUSHALL")
        self.incarnations: Counter[str] = Counter()
        self.open: set[str] = set()  # announced, and not done or given up
        self.newest: dict[str, int] = {}
        self.leases: list[tuple[Service, Lease]] = []  # all there ever were: zombies keep theirs
        self.returned: dict[str, int] = {}  # under which token a stream was last released by its owner
        self.disturbed = False

    def service(self, name: str, incarnation: int | None = None) -> Service:
        return peer(self.client, name, f"i{self.incarnations[name] if incarnation is None else incarnation}")

    def receive(self, service: Service, leases: Any) -> None:
        for lease in leases:
            known = self.newest.get(lease.stream, 0)
            assert lease.token > known, "a token did not grow"
            self.newest[lease.stream] = lease.token
            self.leases.append((service, lease))

    # What producers do

    @rule(stream=STREAM, again=st.booleans())
    def announce(self, stream: str, again: bool) -> None:
        for _ in range(1 + again):
            announce(self.client, SERVICE, stream, {"of": stream})
        self.open.add(stream)

    @rule(text=st.sampled_from(["", "[]", '{"DataStreamName": 1}', "{"]))
    def announce_badly(self, text: str) -> None:
        add_raw(self.client, text)

    # What consumers do

    @rule(
        name=CONSUMER,
        max_new=st.sampled_from([0, 1, 1_000, 1_000]),
        limit=st.sampled_from([None, None, 1, 3]),
        weight=st.sampled_from([1.0, 1.0, 3.0]),
        recovers=st.sampled_from([True, True, False]),
        moves=st.sampled_from([0, 0.2, 1.0]),
        expired=st.sampled_from([None, None, 0, 1]),
        max_losses=st.sampled_from([None, None, 3]),
        gives=st.booleans(),
        why=st.sampled_from(["stuck", "overran"]),
    )
    def round(
        self,
        name: str,
        max_new: int,
        limit: int | None,
        weight: float,
        recovers: bool,
        moves: float,
        expired: int | None,
        max_losses: int | None,
        gives: bool,
        why: str,
    ) -> None:
        service = self.service(name)
        before, announced = len(dead(self.client)), self.unread()
        late = [lease for other, lease in self.leases if other.consumer == name][-1 - (expired or 0) :][:1]
        changes: dict[str, Any] = {
            "max_new": max_new,
            "limit": limit,
            "weight": weight,
            "recovers": recovers,
            "moves": moves,
            "requests_all": True,
            "max_losses": max_losses,
            why: late if expired is not None else (),
        }
        try:
            found = service.heartbeat(heartbeat_request(**changes))
        except NameHeld:
            return
        self.receive(service, found.added)
        assert len(found.added) <= max_new
        assert limit is None or found.held <= limit or not found.added
        assert {lease.stream: lease.token for lease in found.all_held} == self.tokens_of(name)
        self.given_up(before, announced)
        self.checked_share(found, limit)
        if gives and found.excess:
            assert moves > 0
            self.give_back(service, found.all_held[: found.excess])

    def give_back(self, service: Service, leases: Sequence[Lease]) -> None:
        assert service.end_leases("released", leases) == set()
        self.returned |= {lease.stream: lease.token for lease in leases}
        assert service.end_leases("released", leases) == set(), "it may be repeated when its reply was lost"

    def checked_share(self, found: HeartbeatReply, limit: int | None) -> None:
        assert 0 <= found.share <= found.total
        assert limit is None or found.share <= limit
        assert found.excess <= max(0, found.held - found.share)

    def given_up(self, before: int, announced: Sequence[str]) -> None:
        """After its dead letter a stream is open again only if it was announced once more, which was unread by then."""
        for letter in dead(self.client)[before:]:
            if not any(f'"{letter["stream"]}"' in text for text in announced):
                self.open.discard(letter["stream"])
            self.returned.pop(letter["stream"], None)

    @rule(name=CONSUMER, stream=STREAM)
    def claim(self, name: str, stream: str) -> None:
        service = self.service(name)
        owner = owners(self.client).get(stream)
        known = self.client.execute("HEXISTS", KEYS.streams, stream)
        try:
            lease = service.claim(stream)
        except AlreadyOwned:
            assert owner not in (None, name)
        except StreamNotFound:
            assert not known
        except LeaseLost:
            assert not self.is_alive(name)
        else:
            assert owner in (None, name) or not self.is_alive(owner)
            if lease.token != self.newest.get(stream):
                self.receive(service, [lease])

    @rule(which=ANY, done=st.booleans(), count=st.integers(1, 3))
    def end_some(self, which: int, done: bool, count: int) -> None:
        """Every consumer that ever had a lease: zombies, and those that repeat a call."""
        if not self.leases:
            return
        service = self.leases[which % len(self.leases)][0]
        mine = [lease for other, lease in self.leases if other.consumer == service.consumer]
        chosen = {lease.stream: lease for lease in mine[which % len(mine) :][:count]}
        held = self.tokens_of(service.consumer)
        known = {one.decode() for one in self.client.execute("HKEYS", KEYS.streams)}
        refused = service.end_leases("done" if done else "released", list(chosen.values()))
        for stream, lease in chosen.items():
            if held.get(stream) == lease.token:
                assert stream not in refused
                self.returned[stream] = lease.token
                if done:
                    del self.returned[stream]
                    self.open.discard(stream)
                    self.reopen_if_announced_again(stream)
            else:
                repeated = stream not in known if done else self.returned.get(stream) == lease.token
                assert (stream in refused) == (not repeated), "a stale token changed something"
        gone = held.keys() - self.tokens_of(service.consumer).keys()
        assert gone == {stream for stream, lease in chosen.items() if held.get(stream) == lease.token}

    def reopen_if_announced_again(self, stream: str) -> None:
        """An announcement that no consumer has read yet is of a stream to come."""
        waiting = self.unread()
        if any(f'"{stream}"' in text for text in waiting):
            self.open.add(stream)

    @rule(name=CONSUMER, how=st.sampled_from(["released", "expired", "lapsed"]))
    def retire(self, name: str, how: Literal["released", "expired", "lapsed"]) -> None:
        count = len(self.tokens_of(name)) if self.is_known(name) else 0
        assert self.service(name).leave(how) == count
        assert not self.is_known(name)

    @rule(name=CONSUMER)
    def dies_and_begins_anew(self, name: str) -> None:
        self.incarnations[name] += 1

    @rule(name=CONSUMER)
    def time_passes(self, name: str) -> None:
        if self.is_known(name):
            expire(self.client, name)

    @rule()
    def redis_is_away(self) -> None:
        expire(self.client, *filter(self.is_known, NAMES))
        if self.client.execute("EXISTS", KEYS.meta):
            self.client.execute("HINCRBY", KEYS.meta, "heartbeat", -LONG_MS)
        before = owners(self.client)
        for name in NAMES:
            known = self.client.execute("HGET", KEYS.consumers, name)
            if known:
                incarnation = int(known.split()[0].removeprefix(b"i"))
                found = self.service(name, incarnation).heartbeat(heartbeat_request(max_new=0))
                assert (found.is_new, found.owner_losses) == (False, 0), "Redis was away, not they"
        assert owners(self.client) == before

    @rule()
    def others_delete_the_group(self) -> None:
        if self.client.execute("EXISTS", KEYS.input):
            self.client.execute("XGROUP", "DESTROY", KEYS.input, KEYS.group)
            self.disturbed = True

    # What is there

    def is_known(self, name: str) -> bool:
        known = self.client.execute("HGET", KEYS.consumers, name)
        return known is not None and known.split()[0] == f"i{self.incarnations[name]}".encode()

    def is_alive(self, name: str) -> bool:
        score = self.client.execute("ZSCORE", KEYS.alive, name)
        return (
            self.client.execute("HEXISTS", KEYS.consumers, name) == 1
            and score is not None
            and float(score) > server_us(self.client) / 1_000
            and self.is_known(name)
        )

    def tokens_of(self, name: str) -> dict[str, int]:
        pairs = self.client.execute("HGETALL", KEYS.owners)
        found = {s.decode(): o.decode().split(" ") for s, o in zip(pairs[::2], pairs[1::2], strict=True)}
        return {stream: int(token) for stream, (token, owner) in found.items() if owner == name}

    def unread(self) -> list[str]:
        if not self.client.execute("EXISTS", KEYS.input):
            return []
        groups = self.client.execute("XINFO", "GROUPS", KEYS.input)
        last = groups[0][groups[0].index(b"last-delivered-id") + 1] if groups else b"0"
        entries = self.client.execute("XRANGE", KEYS.input, b"(" + last, "+")
        return [items[1].decode() for _, items in entries]

    # What holds after each step

    @invariant()
    def each_open_stream_is_in_one_place(self) -> None:
        if not hasattr(self, "open"):
            return
        owned, waiting = owners(self.client), unassigned(self.client)
        unread = {stream for stream in STREAMS for text in self.unread() if f'"{stream}"' in text}
        assert len(set(waiting)) == len(waiting)
        assert owned.keys().isdisjoint(waiting)
        assert owned.keys() | set(waiting) | unread == self.open, "a stream is lost, or came from nowhere"
        known = self.client.execute("HGETALL", KEYS.streams)
        ids = {s.decode(): i.decode() for s, i in zip(known[::2], known[1::2], strict=True)}
        assert ids.keys() == owned.keys() | set(waiting)
        for key in self.client.execute("KEYS", f"{KEYS.base}:of:*"):
            name = key.decode().rpartition(":")[2]
            members = {one.decode() for one in self.client.execute("SMEMBERS", key)}
            assert members == {stream for stream, owner in owned.items() if owner == name}
            assert self.client.execute("ZSCORE", KEYS.alive, name) is not None, "nobody would ever find it dead"
        assert set(owned.values()) <= {
            key.decode().rpartition(":")[2] for key in self.client.execute("KEYS", f"{KEYS.base}:of:*")
        }
        if self.client.execute("EXISTS", KEYS.meta) and not self.disturbed:
            shown = pending(self.client)
            assert shown == {entry: owned.get(stream, "unassigned") for stream, entry in ids.items()}

    @invariant()
    def no_token_goes_back(self) -> None:
        if not hasattr(self, "open"):
            return
        for name in NAMES:
            for stream, token in self.tokens_of(name).items():
                assert token >= self.newest.get(stream, 0)

    @invariant()
    def shares_add_up(self) -> None:
        if not hasattr(self, "open"):
            return
        pairs = self.client.execute("HGETALL", KEYS.consumers)
        known = {name.decode(): value.decode().split(" ") for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
        living = {name: value for name, value in known.items() if name in NAMES and self.is_alive_as(name, value[0])}
        if not living or living.keys() != known.keys():
            return
        found = {
            name: peer(self.client, name, incarnation).heartbeat(
                heartbeat_request(max_new=0, moves=0, weight=float(weight), limit=int(limit) or None)
            )
            for name, (incarnation, weight, limit) in living.items()
        }
        total = next(iter(found.values())).total
        room = sum(int(limit) or total for _, _, limit in living.values())
        assert sum(one.share for one in found.values()) == min(total, room)

    def is_alive_as(self, name: str, incarnation: str) -> bool:
        return incarnation == f"i{self.incarnations[name]}" and self.is_alive(name)

    def teardown(self) -> None:
        """Whatever happened, one consumer gets all that is open, and can bring it to an end."""
        if not hasattr(self, "open"):
            return
        last = self.service("last", 0)
        last.heartbeat(heartbeat_request(max_new=0))
        expire(self.client, *NAMES)
        leases: list[Lease] = []
        for _ in range(4):
            leases = list(last.heartbeat(heartbeat_request(requests_all=True)).all_held)
        assert {lease.stream for lease in leases} == self.open
        assert last.end_leases("done", leases) == set()
        assert self.client.execute("XLEN", KEYS.input) == 0
        assert pending(self.client) == {}
        assert last.leave() == 0
        left = {key.decode().removeprefix(KEYS.base) for key in self.client.execute("KEYS", f"{KEYS.base}:*")}
        assert left <= {":meta", ":events", ":dead", ":moves"}


def test_any_order_of_steps_keeps_one_owner_for_each_stream_and_loses_none(
    millstream_fresh_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(millstream_fresh_server.url) as client:
        BalancerMachine.client = client
        run_state_machine_as_test(
            BalancerMachine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
