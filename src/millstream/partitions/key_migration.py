"""KeyMigration: after a growth, a key runs in its new partition only when its old one has drained it.

A worker that enqueues entries of a new partition queries the partitions that owned their keys before. If one of them
may still have entries of a key, the key's queue in the new partition waits, until all of these are committed and the
key's state is imported. No entry of a key reaches an old partition after its closing, so a key never returns to a
partition that it has left, and every step may be repeated, late or by several workers at once.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.commit_store import KEY_PREFIX
from millstream.delivery.keyed_stream import KeyedStream
from millstream.errors import CommandFailed, Unavailable
from millstream.partitions.partition_map import PartitionMap, PastOwner, moved_away
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD, HandlerKeys, StreamKeys, is_edited, to_wire
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.replies import pairs_of
from millstream.redis_client.resp import Arg, Reply
from millstream.redis_client.scripts import Script

logger = logging.getLogger(__name__)

AWAIT_KEYS = Script("partitions/await_keys")
EXPORT_KEYS = Script("partitions/export_keys")
IMPORT_KEYS = Script("partitions/import_keys")
IS_DRAINED = Script("partitions/is_drained")
FORWARD_ENTRY = Script("partitions/forward_entry")

_AT_ONCE = 500
_PAGES_AT_ONCE = 20
_REFRESH_EVERY_MS = 500.0
_START = b"0"
_FORWARDED_MS = 86_400_000


@dataclass(slots=True)
class _ExportedKeys:
    """The replies of older partitions about keys that come from them.

    * `exported`: the keys that have left them, each with its state; `max_fence`: the highest fence of those partitions
    * `detours`: keys whose state has to go to another old partition first
    """

    exported: dict[bytes, bytes] = field(default_factory=dict)
    max_fence: int = 0
    detours: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True, slots=True)
class _ExportReply:
    """The reply of one older partition about keys that come from it.

    * `fence`: its newest fencing token
    * `remaining`: keys that may still have entries there; `states`: the states of those that have left one
    """

    owner: PastOwner
    fence: int
    remaining: Sequence[bytes]
    states: Mapping[bytes, bytes]

    @classmethod
    def parse(cls, owner: PastOwner, keys: Sequence[bytes], reply: Sequence[Reply]) -> "_ExportReply":
        """Parse the reply of EXPORT_KEYS about `keys`."""
        if not reply:  # it has entries that are in no key queue yet
            return cls(owner, 0, keys, {})
        answers = list(zip(keys, reply[1:], strict=True))
        return cls(
            owner,
            int(reply[0]),
            [key for key, answer in answers if answer == 0],
            {key: answer for key, answer in answers if isinstance(answer, bytes)},
        )


@dataclass(slots=True)
class _StateScan:
    """A scan of the states in an old partition: its cursor, and whether it found states that must be moved."""

    cursor: bytes = _START
    found_any: bool = False


@dataclass(frozen=True, kw_only=True)
class UndrainedPartition:
    """A partition that may still own keys which left it in generation `since`, and how many of its queues wait for
    keys.
    """

    stream: str
    since: int | None
    awaiting: int


class KeyMigration:
    """Moves the keys of one handler between the partitions of `partition_map`, which may be replaced. For one thread.

    `state_expires`: the handler has a `state_ttl_ms`: a state expires in its new partition when it would have in the old one.
    Every method raises RedisError.
    """

    def __init__(
        self,
        client: Client,
        layout: PartitionMap,
        *,
        app: str,
        handler: str,
        state_expires: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.partition_map = layout
        self._state_expires = "1" if state_expires else ""
        self._client = client
        self._clock = clock
        self._owner = (app, handler)
        self._drained: dict[int, int] = {}
        self._refreshed_ms = -_REFRESH_EVERY_MS
        self._cursors: dict[int, bytes] = {}
        self._scans: dict[PastOwner, _StateScan] = {}

    def keys_of(self, partition: int) -> HandlerKeys:
        """The handler's keys on a partition."""
        return HandlerKeys(*self._owner, self.partition_map.stream(partition))

    # Enqueueing

    def await_keys(self, partition: int, queues: Iterable[bytes]) -> int:
        """Make key queues of a partition wait whose keys may not have left an older one; return how many began to wait.

        Call it before the first entries of `queues` are enqueued there.
        """
        if self._are_older_drained(partition):
            return 0
        keys = [name[1:] for name in dict.fromkeys(queues) if name.startswith(KEY_PREFIX)]
        found = self._query_past_owners(partition, keys)
        # A state is imported while the queue waits, so that no worker runs the key without it.
        return self._await_keys(partition, [key for key in keys if found.exported.get(key) != b""])

    def _await_keys(self, partition: int, keys: Sequence[bytes]) -> int:
        args: list[Arg] = []
        for key in keys:
            if past_owners := self.partition_map.past_owners(key, partition):
                args += (KEY_PREFIX + key, self.partition_map.stream(past_owners[-1].partition))
        return int(self._run([(AWAIT_KEYS, partition, args)])[0]) if args else 0

    # Maintenance

    def import_keys(self, partitions: Sequence[int]) -> int:
        """End the wait of key queues of these partitions whose keys have left the older ones; return how many."""
        new = [partition for partition in partitions if self.partition_map.created_in(partition) > 1]
        keys = [self.keys_of(partition) for partition in new]
        some = call_all(self._client, [("EXISTS", k.awaiting, k.imported) for k in keys])
        busy = [partition for partition, count in zip(new, some, strict=True) if count]
        return sum(map(self._import_keys, busy))

    def _import_keys(self, partition: int) -> int:
        names = self.keys_of(partition)
        cursor, items = self._client.execute(
            "HSCAN", names.awaiting, self._cursors.get(partition, _START), "COUNT", _AT_ONCE
        )
        self._cursors[partition] = cursor
        awaiting = {name[1:]: reason for name, reason in pairs_of(items)}
        found = self._query_past_owners(partition, list(awaiting))
        for detour, keys in found.detours.items():
            self._await_keys(detour, keys)
        ended = 0
        if found.exported:
            imported = [(KEY_PREFIX + key, awaiting[key], state) for key, state in found.exported.items()]
            (ended,) = self._run(
                [(IMPORT_KEYS, partition, [found.max_fence, self._state_expires, *chain.from_iterable(imported)])]
            )
        self._delete_imported(partition)
        return ended

    def _delete_imported(self, partition: int) -> None:
        """Remove from older partitions the states that were imported here."""
        names = self.keys_of(partition)
        _, items = self._client.execute("HSCAN", names.imported, 0, "COUNT", _AT_ONCE)
        moved = items[::2]
        by_owner: dict[int, list[bytes]] = defaultdict(list)
        for key in moved:
            for owner in self.partition_map.past_owners(key, partition)[-1:]:
                by_owner[owner.partition].append(key)
        call_all(self._client, [("HDEL", self.keys_of(owner).state, *keys) for owner, keys in by_owner.items()])
        if moved:
            self._client.execute("HDEL", names.imported, *moved)

    def drain(self, partitions: Sequence[int]) -> int:
        """Check which of these partitions have drained the keys that left them; return how many made progress.

        States of keys without new messages are moved on.
        """
        self._refresh()
        return sum(map(self._drain, partitions))

    def _undrained_since(self, partition: int) -> int | None:
        """The first generation in which keys left a partition that may not have drained them."""
        first = max(self.partition_map.created_in(partition), self._drained.get(partition, 0)) + 1
        return first if first <= self.partition_map.generation else None

    def _drain(self, partition: int) -> bool:
        left = self._undrained_since(partition)
        # Keys that are still to come from older partitions would have to go on from here.
        if left is None or not self._are_older_drained(partition):
            return False
        past_owner = PastOwner(partition, left)
        if not self._run(
            [(IS_DRAINED, partition, (self.partition_map.close_id(past_owner), self.keys_of(partition).group))]
        )[0]:
            return False
        scan = self._scans.setdefault(past_owner, _StateScan())
        for _ in range(_PAGES_AT_ONCE):
            scan.cursor, items = self._client.execute(
                "HSCAN", self.keys_of(partition).state, scan.cursor, "COUNT", _AT_ONCE
            )
            leaving: dict[int, list[bytes]] = defaultdict(list)
            for key, after in moved_away(self.partition_map, partition, items[::2], left):
                leaving[after].append(key)
            for after, keys in leaving.items():
                self._await_keys(after, keys)
            scan.found_any = scan.found_any or bool(leaving)
            if scan.cursor == _START:
                break
        if scan.cursor == _START:
            del self._scans[past_owner]
            if not scan.found_any:
                self._client.execute("HSET", self.keys_of(partition).meta, "drained", left)
                self._drained[partition] = left
        return True

    def undrained(self) -> list[UndrainedPartition]:
        """Return the partitions that keys may still leave, or wait to come to."""
        self._refresh()
        layout = self.partition_map
        counts = call_all(
            self._client, [("HLEN", self.keys_of(partition).awaiting) for partition in range(layout.count)]
        )
        found = [
            UndrainedPartition(stream=layout.stream(partition), since=self._undrained_since(partition), awaiting=count)
            for partition, count in enumerate(counts)
        ]
        return [one for one in found if one.since is not None or one.awaiting]

    # Querying older partitions

    def _query_past_owners(self, partition: int, keys: Sequence[bytes]) -> _ExportedKeys:
        """Query the older partitions about keys that come from there, the oldest first.

        In this order, since a state that has left one partition for the next is seen in the next.
        """
        found = _ExportedKeys()
        asked = {key: self.partition_map.past_owners(key, partition) for key in keys}
        found.exported = dict.fromkeys(asked, b"")
        for level in range(max(map(len, asked.values()), default=0)):
            by_owner: dict[PastOwner, list[bytes]] = defaultdict(list)
            for key in list(found.exported):
                if level < len(asked[key]) and not self._is_drained(asked[key][level]):
                    by_owner[asked[key][level]].append(key)
            for reply in self._export_keys(by_owner):
                found.max_fence = max(found.max_fence, reply.fence)
                found.exported |= reply.states
                on_the_way = [key for key in reply.states if reply.owner != asked[key][-1]]
                for key in on_the_way:
                    found.detours[asked[key][level + 1].partition].append(key)
                for key in (*reply.remaining, *on_the_way):
                    del found.exported[key]
        return found

    def _export_keys(self, by_owner: dict[PastOwner, list[bytes]]) -> Iterator[_ExportReply]:
        calls: list[tuple[Script, int, Sequence[Arg]]] = []
        asked: list[tuple[PastOwner, list[bytes]]] = []
        for owner, keys in by_owner.items():
            for at in range(0, len(keys), _AT_ONCE):
                some = keys[at : at + _AT_ONCE]
                asked.append((owner, some))
                calls.append(
                    (
                        EXPORT_KEYS,
                        owner.partition,
                        [self.partition_map.close_id(owner), self._state_expires, *(KEY_PREFIX + key for key in some)],
                    )
                )
        for (owner, some), reply in zip(asked, self._run(calls), strict=True):
            yield _ExportReply.parse(owner, some, reply)

    # Known drained partitions

    def _is_drained(self, past_owner: PastOwner) -> bool:
        return self._drained.get(past_owner.partition, 0) >= past_owner.left_in

    def _are_older_drained(self, partition: int) -> bool:
        """Whether all older partitions have drained the keys that this one owns."""
        created_in = self.partition_map.created_in(partition)
        if created_in == 1:
            return True
        older = range(self.partition_map.counts[created_in - 2])
        if all(self._drained.get(one, 0) >= created_in for one in older):
            return True
        self._refresh()
        return all(self._drained.get(one, 0) >= created_in for one in older)

    def _refresh(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._refreshed_ms < _REFRESH_EVERY_MS:
            return
        partitions = [
            partition for partition in range(self.partition_map.count) if self._undrained_since(partition) is not None
        ]
        known = call_all(self._client, [("HGET", self.keys_of(partition).meta, "drained") for partition in partitions])
        self._drained.update({partition: int(text) for partition, text in zip(partitions, known, strict=True) if text})
        self._refreshed_ms = now_ms

    def _run(self, calls: Sequence[tuple[Script, int, Sequence[Arg]]]) -> list[Reply]:
        wanted = [(script, self.keys_of(partition).commit_keys, args) for script, partition, args in calls]
        return self._client.scripts(wanted) if wanted else []


def forward_entry(
    client: Client, base: str, keys: HandlerKeys, key: bytes, entry_id: bytes, pairs: Sequence[bytes]
) -> bool:
    """Forward a redriven entry, once, to the partition that owns its key now; False if its key has not moved.

    The dead letter of an edited copy goes along: it is added there before it is removed here. `keys`: the handler's, on
    the partition that the entry is in. Raises RedisError.
    """
    partitions = Partitions(client, base)
    layout = partitions.finish_growth(partitions.require())
    owner = layout.stream(layout.partition_of(key))
    if owner == keys.stream:
        return False
    there = HandlerKeys(keys.app, keys.handler, owner)
    letter_id = client.execute("HGET", to_wire(keys.resent), entry_id) if is_edited(pairs) else None
    letter = [] if letter_id is None else _letter_for(client, keys, letter_id, owner)
    sent = there.forwarded(keys.stream, entry_id)
    names = map(to_wire, (owner, StreamKeys(owner).partition, sent, there.dead_letters, there.resent))
    try:
        client.script(FORWARD_ENTRY, tuple(names), (layout.generation, _FORWARDED_MS, len(letter), *letter, *pairs))
    except CommandFailed as error:
        if error.code != "CLOSED":
            raise
        raise Unavailable(f"{owner} was closed by a growth meanwhile; trying again") from error
    if letter_id is not None:
        client.execute("XDEL", to_wire(keys.dead_letters), letter_id)
        client.execute("HDEL", to_wire(keys.resent), entry_id, b"l" + letter_id)
    return True


def _letter_for(client: Client, keys: HandlerKeys, letter_id: bytes, owner: str) -> list[bytes]:
    """The items of a dead letter for the partition `owner`; none if it is gone."""
    found = client.execute("XRANGE", to_wire(keys.dead_letters), letter_id, letter_id)
    items = pairs_of(found[0][1]) if found else ()
    return [one for name, value in items for one in (name, to_wire(owner) if name == b"stream" else value)]


class PartitionStream(KeyedStream):
    """One worker's membership in one partition: it lets a key wait that may not have left another partition.

    Set `partition`, and `migration` and `forward` before it enqueues; `forward` publishes a redriven entry to the
    partition that owns its key now, under a new id, and returns False if that is this one.
    """

    partition: int
    migration: KeyMigration
    forward: Callable[[str, bytes, bytes, Sequence[bytes]], bool]
    _warned = False

    def _queue_name(self, entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
        """A redriven dead letter returns to its old partition, and its key may have left it since."""
        queue = super()._queue_name(entry_id, pairs)
        if pairs[0] != REDRIVE_FIELD or not queue.startswith(KEY_PREFIX):
            return queue
        return b"" if self.forward(self.stream, queue[1:], entry_id, pairs) else queue

    def _before_enqueue(self, queues: Sequence[Arg]) -> None:
        names = [name for name in queues if isinstance(name, bytes)]
        if names:
            self._check_key(names[0])
            self.migration.await_keys(self.partition, names)

    def _check_key(self, queue: bytes) -> None:
        """Warn if producer and handler do not use the same key."""
        if (
            not self._warned
            and queue.startswith(KEY_PREFIX)
            and self.partition not in self.migration.partition_map.owners(queue[1:])
        ):
            self._warned = True
            logger.warning(
                "a message in %s has the key %r, which another partition owns: publish with PartitionedProducer and the "
                "handler's key, or the order of keys is lost when the partitions grow",
                self.stream,
                queue[1:100],
            )
