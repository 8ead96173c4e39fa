"""ReplicaReads: reads entries from replicas that are up to date with their primary, else from the primary.

A replica has its primary's history up to an offset (Redis documentation, "Replication"). A replica that has reached the
primary's offset of the task's start, and so that of the batch's planning, has applied every earlier write.
`docs/decisions/0022-replica-reads.md` has the protocol.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import SystemRandom
from typing import NamedTuple

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, RedisError, Unavailable
from millstream.redis_client.client import Client, Command, Reply, raise_if_error
from millstream.redis_client.resp import Node, ReplySize
from millstream.redis_client.urls import Shard
from millstream.spark.source.row_decoder import Entry
from millstream.spark.source.stream_info import fetch_calls

logger = logging.getLogger(__name__)

_TIMEOUT_MS = 2_000
_CATCH_UP_MS = 100.0
_REST_MS = 1_000.0
_REST_SHARE = 10
_NOBODY_MS = 10_000.0
_SAID_MS = 600_000.0
_ABOUT = ("INFO", "replication", "stats")


class Point(NamedTuple):
    """A replication offset: the history (replication id) and the number of bytes of it."""

    history: str
    offset: int

    def reaches(self, other: "Point") -> bool:
        """True if this point includes every write up to `other`."""
        return self.history == other.history and self.offset >= other.offset


class Replicas:
    """The replicas of a deployment, for all tasks of a process: connections to them, and temporary bans."""

    def __init__(self, client: Client, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.client = client
        self.clock = clock
        self._open: dict[Node, Client] = {}
        self._rest_until_ms: dict[Node | Shard, float] = {}
        self._said_ms: dict[Node | Shard, float] = {}

    def of_node(self, node: Node) -> Client:
        """The client of one replica."""
        if node not in self._open:
            self._open[node] = self.client.of_node(node, timeout_ms=_TIMEOUT_MS)
        return self._open[node]

    def rest_ms(self, one: Node | Shard) -> float:
        """Milliseconds until the ban of a replica, or of all replicas of a primary, ends; 0 or less: no ban."""
        return self._rest_until_ms.get(one, 0.0) - self.clock.monotonic_ms()

    def leave(self, one: Node | Shard, for_ms: float, why: str = "") -> None:
        """Ban a replica, or all replicas of a primary, for `for_ms`; log why, once in ten minutes."""
        now_ms = self.clock.monotonic_ms()
        self._rest_until_ms[one] = now_ms + for_ms
        if why and now_ms - self._said_ms.get(one, -_SAID_MS) >= _SAID_MS:
            self._said_ms[one] = now_ms
            logger.warning("%s; reading from another replica or the primary for now", why)

    def close(self) -> None:
        """Close every connection to a replica."""
        for client in self._open.values():
            client.close()
        self._open.clear()


@functools.cache
def replicas_of(client: Client) -> Replicas:
    """The replicas of this process for the deployment of `client`."""
    return Replicas(client)


@dataclass(slots=True)
class _Way:
    """The replicas of a primary that a task may read from: those that reach `needed`, as `found` did."""

    needed: Point
    nodes: list[Node]
    found: Node | None = None


class ReplicaReads:
    """Reads ranges of streams for one task, from replicas where possible."""

    def __init__(self, replicas: Replicas) -> None:
        self._client = replicas.client
        self._clock = replicas.clock
        self._replicas = replicas
        self._ways: dict[Shard, _Way] = {}
        self._last: dict[Shard, Node] = {}

    def ask(self, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
        """Run XRANGE commands as `stream_info.fetch_calls` does; the replies are those that primaries would give.

        If a reply ends before its COUNT and its last id, the primary is asked for the rest: a key may be missing on a
        replica alone (its clock is ahead of an expiry, its slot moves).
        """
        of_shard: dict[Shard, list[int]] = {}
        for index, command in enumerate(commands):
            of_shard.setdefault(self._client.shard(command[1]), []).append(index)
        replies: list[Reply] = [[] for _ in commands]
        left: dict[int, Command] = {}
        for shard, indexes in of_shard.items():
            found = self._by_replica(shard, [commands[i] for i in indexes], meter)
            if found is not None:
                for index, reply in zip(indexes, found, strict=True):
                    replies[index] = reply
            unanswered = {i: rest for i in indexes if (rest := _rest(commands[i], replies[i])) is not None}
            if unanswered:
                left |= unanswered
                self._ways.pop(shard, None)  # later replies must not be older than the primary's reply of now
        for index, reply in zip(left, fetch_calls(self._client, list(left.values()), meter), strict=True):
            replies[index] = replies[index] + reply if isinstance(reply, list) else reply
        return replies

    def _by_replica(
        self, shard: Shard, commands: Sequence[Command], meter: ReplySize | None = None
    ) -> Sequence[Reply] | None:
        """The replies of a replica; None if no replica is usable."""
        if self._replicas.rest_ms(shard) > 0:
            return None
        way = self._ways.get(shard) or self._begin(shard, commands[0])
        if way is None:
            return None
        for node in sorted(way.nodes, key=lambda node: node != self._last.get(shard)):
            if self._replicas.rest_ms(node) > 0:
                continue
            began_ms = self._clock.monotonic_ms()
            try:
                replies = self._exchange(way, node, commands, meter)
            except (RedisError, ConfigError) as error:
                if meter is not None and meter.exceeded:
                    raise  # the reply is too large, on any node
                # A replica that hangs may cost only a tenth of the time.
                wasted_ms = self._clock.monotonic_ms() - began_ms
                why = f"readFrom=replica: cannot read from {node[0]}:{node[1]}: {error}"
                self._replicas.leave(node, max(_REST_MS, wasted_ms * _REST_SHARE), why)
            else:
                self._last[shard] = node
                return replies
        self._replicas.leave(shard, min(map(self._replicas.rest_ms, way.nodes)))
        return None

    def _begin(self, shard: Shard, command: Command) -> _Way | None:
        """Fetch the primary's replication offset and its replicas. Raises Unavailable."""
        try:
            about = _read(self._client.execute_beside(command[1], *_ABOUT))
            point = Point(about["master_replid"], int(about["master_repl_offset"]))
            nodes = list(shard.replicas if shard.replicas is not None else _attached(about))
        except Unavailable:
            raise
        except (RedisError, KeyError, ValueError) as error:  # such as a proxy, whose INFO differs
            self._replicas.leave(shard, _NOBODY_MS, f"readFrom=replica: cannot find the primary's replicas: {error!r}")
            return None
        if about.get("role") != "master":
            return None  # a failover since the planning; a read from this node finds the new primary
        if not nodes:
            self._replicas.leave(shard, _NOBODY_MS, "readFrom=replica: the primary has no connected replica")
            return None
        # Not `random`: Spark forks its workers, so all of them would choose the same.
        SystemRandom().shuffle(nodes)
        way = self._ways[shard] = _Way(point, nodes)
        return way

    def _exchange(self, way: _Way, node: Node, commands: Sequence[Command], meter: ReplySize | None) -> list[Reply]:
        """Run `commands` on one replica. Checks its offset before and after: its primary may change in between."""
        client = self._replicas.of_node(node)
        greeting = [("READONLY",)] if self._client.is_cluster else []
        if node != way.found:
            self._meet(client, greeting)
            self._catch_up(client, way.needed)
        replies = client.pipeline([*greeting, _ABOUT, *commands, _ABOUT], meter)[len(greeting) :]
        before, after = _standing(replies[0]), _standing(replies[-1])
        if not (before.reaches(way.needed) and after.reaches(before)):
            raise Unavailable("it no longer replicates the same primary")
        found = [raise_if_error(reply) for reply in replies[1:-1]]
        way.needed, way.found = after, node
        return found

    def _meet(self, client: Client, greeting: Sequence[Command]) -> None:
        """Open a connection: that of an earlier task may have been closed since."""
        first = greeting[0] if greeting else _ABOUT
        try:
            client.execute(*first)
        except Unavailable:
            client.execute(*first)

    def _catch_up(self, client: Client, needed: Point) -> None:
        """Wait until a replica reaches `needed`: usually it has, or does in a millisecond. Raises Unavailable."""
        until_ms = self._clock.monotonic_ms() + _CATCH_UP_MS
        pause_ms = 1.0
        while not (standing := _standing(client.execute(*_ABOUT))).reaches(needed):
            if standing.history != needed.history:
                raise Unavailable("it replicates another primary, or none yet")
            if self._clock.monotonic_ms() >= until_ms:
                raise Unavailable(f"it is {needed.offset - standing.offset:,} bytes behind its primary")
            self._clock.sleep_ms(pause_ms)
            pause_ms *= 2


def _read(reply: Reply) -> dict[str, str]:
    """The fields of a reply to INFO."""
    lines = raise_if_error(reply).decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _standing(reply: Reply) -> Point:
    """The replication offset of a replica. Raises Unavailable if its data may differ from what its primary sent."""
    about = _read(reply)
    if "slave_repl_offset" not in about:
        raise Unavailable("it is not a replica now")
    if about.get("slave_read_only") != "1":
        raise Unavailable("clients may write to it (replica-read-only no)")
    if about.get("evicted_keys") != "0":
        raise Unavailable("it has evicted keys itself (evicted_keys in INFO)")
    try:
        return Point(about["master_replid"], int(about["slave_repl_offset"]))
    except (KeyError, ValueError) as error:
        raise Unavailable(f"its INFO has no replication offset: {error!r}") from error


def _attached(about: dict[str, str]) -> list[Node]:
    """The replicas in a primary's INFO."""
    nodes = []
    for name, value in about.items():
        if name.startswith("slave") and name[5:].isdecimal():
            fields = dict(part.split("=", 1) for part in value.split(","))
            nodes.append((fields["ip"], int(fields["port"])))
    return nodes


def _rest(command: Command, entries: Sequence[Entry]) -> Command | None:
    """The command for the rest of a range of which `entries` are known; None if it is complete."""
    name, stream, first, last, *limit = command
    if entries and (entries[-1][0] == last or (limit and len(entries) >= int(limit[1]))):
        return None
    after = b"(" + entries[-1][0] if entries else first
    return (name, stream, after, last, *(("COUNT", int(limit[1]) - len(entries)) if limit else ()))
