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
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.replies import fields_of_info
from millstream.redis_client.resp import Command, Node, Reply, ReplySize
from millstream.redis_client.urls import Shard
from millstream.spark.source.entry_segment import Entry
from millstream.spark.source.stream_info import fetch_calls

logger = logging.getLogger(__name__)

_TIMEOUT_MS = 2_000
_CATCH_UP_MS = 100.0
_MIN_BAN_MS = 1_000.0
_BAN_FACTOR = 10
_NO_REPLICA_BAN_MS = 10_000.0
_LOG_INTERVAL_MS = 600_000.0
_INFO = ("INFO", "replication", "stats")


class ReplicationOffset(NamedTuple):
    """A replication offset: the history (replication id) and the number of bytes of it."""

    history: str
    offset: int

    def includes(self, other: "ReplicationOffset") -> bool:
        """True if this point includes every write up to `other`."""
        return self.history == other.history and self.offset >= other.offset


class Replicas:
    """The replicas of a deployment, for all tasks of a process: connections to them, and temporary bans."""

    def __init__(self, client: Client, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.client = client
        self.clock = clock
        self._clients: dict[Node, Client] = {}
        self._banned_until_ms: dict[Node | Shard, float] = {}
        self._logged_ms: dict[Node | Shard, float] = {}

    def client_of(self, node: Node) -> Client:
        """The client of one replica."""
        if node not in self._clients:
            self._clients[node] = self.client.node_client(node, timeout_ms=_TIMEOUT_MS)
        return self._clients[node]

    def ban_ms(self, target: Node | Shard) -> float:
        """Milliseconds until the ban of a replica, or of all replicas of a primary, ends; 0 or less: no ban."""
        return self._banned_until_ms.get(target, 0.0) - self.clock.monotonic_ms()

    def ban(self, target: Node | Shard, for_ms: float, why: str = "") -> None:
        """Ban a replica, or all replicas of a primary, for `for_ms`; log why, once in ten minutes."""
        now_ms = self.clock.monotonic_ms()
        self._banned_until_ms[target] = now_ms + for_ms
        if why and now_ms - self._logged_ms.get(target, -_LOG_INTERVAL_MS) >= _LOG_INTERVAL_MS:
            self._logged_ms[target] = now_ms
            logger.warning("%s; reading from another replica or the primary for now", why)

    def close(self) -> None:
        """Close every connection to a replica."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


@functools.cache
def replicas_of(client: Client) -> Replicas:
    """The replicas of this process for the deployment of `client`."""
    return Replicas(client)


@dataclass(slots=True)
class _ReplicaRoute:
    """The replicas of a primary that a task may read from: those that reach `min_offset`, as `current` did."""

    min_offset: ReplicationOffset
    nodes: list[Node]
    current: Node | None = None


class ReplicaReads:
    """Reads ranges of streams for one task, from replicas where possible."""

    def __init__(self, replicas: Replicas) -> None:
        self._client = replicas.client
        self._clock = replicas.clock
        self._replicas = replicas
        self._routes: dict[Shard, _ReplicaRoute] = {}
        self._last_nodes: dict[Shard, Node] = {}

    def fetch(self, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
        """Run XRANGE commands as `stream_info.fetch_calls` does; the replies are those that primaries would give.

        If a reply ends before its COUNT and its last id, the rest is read from the primary: a key may be missing on a
        replica alone (its clock is ahead of an expiry, its slot moves).
        """
        of_shard: dict[Shard, list[int]] = {}
        for index, command in enumerate(commands):
            of_shard.setdefault(self._client.shard(command[1]), []).append(index)
        replies: list[Reply] = [[] for _ in commands]
        left: dict[int, Command] = {}
        for shard, indexes in of_shard.items():
            entries = self._read_from_replica(shard, [commands[i] for i in indexes], meter)
            if entries is not None:
                for index, reply in zip(indexes, entries, strict=True):
                    replies[index] = reply
            unanswered = {i: rest for i in indexes if (rest := _rest_of(commands[i], replies[i])) is not None}
            if unanswered:
                left |= unanswered
                self._routes.pop(shard, None)  # later replies must not be older than the primary's reply of now
        for index, reply in zip(left, fetch_calls(self._client, list(left.values()), meter), strict=True):
            replies[index] = replies[index] + reply if isinstance(reply, list) else reply
        return replies

    def _read_from_replica(
        self, shard: Shard, commands: Sequence[Command], meter: ReplySize | None = None
    ) -> Sequence[Reply] | None:
        """The replies of a replica; None if no replica is usable."""
        if self._replicas.ban_ms(shard) > 0:
            return None
        route = self._routes.get(shard) or self._find_replicas(shard, commands[0])
        if route is None:
            return None
        for node in sorted(route.nodes, key=lambda node: node != self._last_nodes.get(shard)):
            if self._replicas.ban_ms(node) > 0:
                continue
            began_ms = self._clock.monotonic_ms()
            try:
                replies = self._read_consistently(route, node, commands, meter)
            except (RedisError, ConfigError) as error:
                if meter is not None and meter.exceeded:
                    raise  # the reply is too large, on any node
                # A replica that hangs may cost only a tenth of the time.
                spent_ms = self._clock.monotonic_ms() - began_ms
                why = f"readFrom=replica: cannot read from {node[0]}:{node[1]}: {error}"
                self._replicas.ban(node, max(_MIN_BAN_MS, spent_ms * _BAN_FACTOR), why)
            else:
                self._last_nodes[shard] = node
                return replies
        self._replicas.ban(shard, min(map(self._replicas.ban_ms, route.nodes)))
        return None

    def _find_replicas(self, shard: Shard, command: Command) -> _ReplicaRoute | None:
        """Fetch the primary's replication offset and its replicas. Raises Unavailable."""
        try:
            info = fields_of_info(self._client.execute_on_node_of(command[1], *_INFO))
            point = ReplicationOffset(info["master_replid"], int(info["master_repl_offset"]))
            nodes = list(shard.replicas if shard.replicas is not None else _connected_replicas(info))
        except Unavailable:
            raise
        except (RedisError, KeyError, ValueError) as error:  # such as a proxy, whose INFO differs
            self._replicas.ban(
                shard, _NO_REPLICA_BAN_MS, f"readFrom=replica: cannot find the primary's replicas: {error!r}"
            )
            return None
        if info.get("role") != "master":
            return None  # a failover since the planning; a read from this node finds the new primary
        if not nodes:
            self._replicas.ban(shard, _NO_REPLICA_BAN_MS, "readFrom=replica: the primary has no connected replica")
            return None
        # Not `random`: Spark forks its workers, so all of them would choose the same.
        SystemRandom().shuffle(nodes)
        route = self._routes[shard] = _ReplicaRoute(point, nodes)
        return route

    def _read_consistently(
        self, route: _ReplicaRoute, node: Node, commands: Sequence[Command], meter: ReplySize | None
    ) -> list[Reply]:
        """Run `commands` on one replica. Checks its offset before and after: its primary may change in between."""
        client = self._replicas.client_of(node)
        readonly = [("READONLY",)] if self._client.is_cluster else []
        if node != route.current:
            self._reconnect(client, readonly)
            self._wait_until_caught_up(client, route.min_offset)
        replies = client.pipeline([*readonly, _INFO, *commands, _INFO], meter)[len(readonly) :]
        before, after = _offset_of(replies[0]), _offset_of(replies[-1])
        if not (before.includes(route.min_offset) and after.includes(before)):
            raise Unavailable("it no longer replicates the same primary")
        entries = [raise_if_error(reply) for reply in replies[1:-1]]
        route.min_offset, route.current = after, node
        return entries

    def _reconnect(self, client: Client, readonly: Sequence[Command]) -> None:
        """Open a connection: that of an earlier task may have been closed since."""
        first = readonly[0] if readonly else _INFO
        try:
            client.execute(*first)
        except Unavailable:
            client.execute(*first)

    def _wait_until_caught_up(self, client: Client, needed: ReplicationOffset) -> None:
        """Wait until a replica reaches `needed`: usually it has, or does in a millisecond. Raises Unavailable."""
        until_ms = self._clock.monotonic_ms() + _CATCH_UP_MS
        pause_ms = 1.0
        while not (reached := _offset_of(client.execute(*_INFO))).includes(needed):
            if reached.history != needed.history:
                raise Unavailable("it replicates another primary, or none yet")
            if self._clock.monotonic_ms() >= until_ms:
                raise Unavailable(f"it is {needed.offset - reached.offset:,} bytes behind its primary")
            self._clock.sleep_ms(pause_ms)
            pause_ms *= 2


def _offset_of(reply: Reply) -> ReplicationOffset:
    """The replication offset of a replica. Raises Unavailable if its data may differ from what its primary sent."""
    info = fields_of_info(raise_if_error(reply))
    if "slave_repl_offset" not in info:
        raise Unavailable("it is not a replica now")
    if info.get("slave_read_only") != "1":
        raise Unavailable("clients may write to it (replica-read-only no)")
    if info.get("evicted_keys") != "0":
        raise Unavailable("it has evicted keys itself (evicted_keys in INFO)")
    try:
        return ReplicationOffset(info["master_replid"], int(info["slave_repl_offset"]))
    except (KeyError, ValueError) as error:
        raise Unavailable(f"its INFO has no replication offset: {error!r}") from error


def _connected_replicas(info: dict[str, str]) -> list[Node]:
    """The replicas in a primary's INFO."""
    nodes = []
    for name, value in info.items():
        if name.startswith("slave") and name[5:].isdecimal():
            fields = dict(part.split("=", 1) for part in value.split(","))
            nodes.append((fields["ip"], int(fields["port"])))
    return nodes


def _rest_of(command: Command, entries: Sequence[Entry]) -> Command | None:
    """The command for the rest of a range of which `entries` are known; None if it is complete."""
    name, stream, first, last, *limit = command
    if entries and (entries[-1][0] == last or (limit and len(entries) >= int(limit[1]))):
        return None
    after = b"(" + entries[-1][0] if entries else first
    return (name, stream, after, last, *(("COUNT", int(limit[1]) - len(entries)) if limit else ()))
