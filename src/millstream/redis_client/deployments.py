"""Deployments of Redis: a server, a Sentinel service, a cluster; which connection has which key."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import millstream.redis_client.redis_py  # noqa: F401 - before redis itself

# isort: split
import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import Connection, ConnectionPool, parse_url
from redis.exceptions import RedisClusterException
from redis.retry import Retry as RedisRetry
from redis.sentinel import Sentinel

from millstream.errors import ConfigError, Unavailable
from millstream.redis_client.redaction import redact_url
from millstream.redis_client.resp import Arg, Node
from millstream.redis_client.urls import Shard, hosts, split_url, url_of_node

_NO_RETRY: dict[str, Any] = {"protocol": 2, "decode_responses": False, "health_check_interval": 0}
_OTHER_PRIMARIES = 3


class _Route(Protocol):
    """Chooses the connection pool for a key. The three kinds of deployment differ only in this."""

    def pool(self, key: Arg | None) -> ConnectionPool: ...

    def pools(self) -> Iterable[ConnectionPool]: ...

    def on_moved(self) -> None: ...

    def node_pool(self, host: str, port: int) -> ConnectionPool: ...

    def shard(self, key: Arg) -> Shard: ...


class _SingleServerRoute:
    """A single server, or the primary that Sentinel names: one pool for all keys."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    def pool(self, key: Arg | None) -> ConnectionPool:
        return self._pool

    def pools(self) -> Iterable[ConnectionPool]:
        return (self._pool,)

    def on_moved(self) -> None:
        raise ConfigError("this server is part of a Redis Cluster; connect with redis+cluster://HOST:PORT")

    def node_pool(self, host: str, port: int) -> ConnectionPool:
        return self._pool

    def shard(self, key: Arg) -> Shard:
        return Shard()


class _SingleNodeRoute(_SingleServerRoute):
    """One node of a cluster or replica set: only its own data; redirections are not followed."""

    def on_moved(self) -> None:
        raise Unavailable("it does not serve this hash slot (any more)")


@contextmanager
def _reading_slots() -> Iterator[None]:
    """Translate the error of redis-py where no node owns a slot, as before a cluster is complete."""
    try:
        yield
    except IndexError:  # it takes the first primary
        raise RedisClusterException("no node of the cluster owns a hash slot") from None


class _ClusterRoute:
    """Redis Cluster: one pool per primary, chosen by the key's hash slot."""

    def __init__(self, nodes: Sequence[Node], settings: Mapping[str, Any]) -> None:
        with _reading_slots():
            self._cluster = RedisCluster(startup_nodes=[ClusterNode(*one) for one in nodes], **settings)

    def _pool_of(self, node: ClusterNode) -> ConnectionPool:
        pool: ConnectionPool = self._cluster.get_redis_connection(node).connection_pool
        return pool

    def pool(self, key: Arg | None) -> ConnectionPool:
        if key is None:
            return self._pool_of(self._cluster.get_primaries()[0])
        slot = self._cluster.keyslot(key)
        return self._pool_of(self._cluster.nodes_manager.get_node_from_slot(slot))

    def pools(self) -> Iterable[ConnectionPool]:
        # In the order of their names, which is the same for all clients.
        return [self._pool_of(node) for node in sorted(self._cluster.get_primaries(), key=lambda node: str(node.name))]

    def on_moved(self) -> None:
        with _reading_slots():
            self._cluster.nodes_manager.initialize()

    def node_pool(self, host: str, port: int) -> ConnectionPool:
        node = self._node(host, port)
        if node is None:
            self.on_moved()
            node = self._node(host, port)
        if node is None:
            raise Unavailable(f"the cluster named {host}:{port}, which is not one of its nodes; try again")
        return self._pool_of(node)

    def _node(self, host: str, port: int) -> ClusterNode | None:
        """The node at this address. One that has met no other does not know its host: CLUSTER SLOTS has "" then."""
        named: ClusterNode | None = self._cluster.get_node(host=host, port=port) if host else None
        return named or next((node for node in self._cluster.get_primaries() if not host and node.port == port), None)

    def shard(self, key: Arg) -> Shard:
        slot = self._cluster.keyslot(key)
        primary = self._cluster.nodes_manager.get_node_from_slot(slot)
        others = self._cluster.nodes_manager.slots_cache[slot][1:]
        return Shard((primary.host, primary.port), tuple((node.host, node.port) for node in others))


def open_connection(pool: ConnectionPool) -> Any:
    """A connection of `pool` that is set up: its user is logged in, and its database selected. Raises REDIS_ERRORS."""
    try:
        return pool.get_connection()
    except BaseException:
        pool.disconnect()  # a later call would use one whose setup was interrupted, as if it were complete
        raise


def _connection_settings(url: str) -> dict[str, Any]:
    """The connection settings of a plain `url`. Raises ValueError, also for errors that redis-py ignores or defers."""
    parts = urlsplit(url)
    try:
        _ = parts.port
    except ValueError:  # its text may quote a password
        raise ValueError("the port is not a number up to 65,535") from None
    settings = dict(parse_url(url))
    database = "" if parts.scheme == "unix" else parts.path.strip("/")
    if (database and not database.isdecimal()) or settings.get("db", 0) < 0:
        raise ValueError(f"{database or settings['db']!r} is not a database; write its number, like /0")
    options = {name: value for name, value in settings.items() if name != "connection_class"}
    try:
        # Without `driver_info`, redis-py would look for its version among the installed packages: half a millisecond.
        settings.get("connection_class", Connection)(**{"driver_info": None, **options})
    except (TypeError, redis.exceptions.RedisError) as error:
        raise ValueError(f"an option after the '?' is unknown or wrong ({error})") from error
    return settings


def _no_setinfo(scheme: str, *, logs_in: bool) -> dict[str, Any]:
    """Settings that suppress CLIENT SETINFO, where possible.

    Redis 7.2 and later log it as denied for each user with minimal rights. Over TLS, redis-py needs one answered
    command before it calls a connection ready: it checks for unexpected data, and TLS session tickets are such data. A
    login is an answered command.
    """
    return {} if scheme == "rediss" and not logs_in else {"driver_info": None}


def _wrong_scheme(url: str) -> ConfigError:
    return ConfigError(
        f"{redact_url(url)!r}: the URL must begin with redis://, rediss://, unix://, redis+sentinel:// or "
        "redis+cluster:// (rediss+... for TLS)"
    )


def parse_route(url: str, timeout_ms: int) -> Callable[[], _Route]:
    """Parse a URL of any kind of deployment. Raises ConfigError; connects only when the returned function is called."""
    settings = dict(_NO_RETRY, retry=RedisRetry(NoBackoff(), 0), encoding_errors="surrogateescape")  # as `to_wire`
    settings |= {"socket_timeout": timeout_ms / 1000, "socket_connect_timeout": min(timeout_ms, 5000) / 1000}
    parts = split_url(url)
    scheme, _, kind = parts.scheme.partition("+")
    settings |= _no_setinfo(scheme, logs_in="@" in parts.netloc)
    try:
        if not kind and scheme in ("redis", "rediss", "unix"):
            if not url[len(scheme) :].startswith("://"):
                raise _wrong_scheme(url)
            _connection_settings(url)
            return lambda: _SingleServerRoute(ConnectionPool.from_url(url, **settings))
        if kind not in ("sentinel", "cluster") or scheme not in ("redis", "rediss"):
            raise _wrong_scheme(url)
        nodes = hosts(parts.netloc, 26379 if kind == "sentinel" else 6379)
        service = parts.path.strip("/").partition("/")[0]  # Sentinel's
        if kind == "cluster" and service not in ("", "0"):
            raise ConfigError(f"{redact_url(url)!r}: Redis Cluster has database 0 only; omit {parts.path!r}")
        node_settings = _connection_settings(url_of_node(url, nodes[0]))
        settings |= {k: v for k, v in node_settings.items() if k not in ("host", "port", "connection_class")}
    except ValueError as error:
        raise ConfigError(f"{redact_url(url)!r} is not a Redis URL: {error}") from None
    tls: dict[str, Any] = {"ssl": True} if scheme == "rediss" else {}
    if kind == "cluster":
        # One primary that is down, or a slot without an owner, keeps no client from the others: redis-py asks the first
        # primary for its commands, and another one only with retries. They concern no command of ours.
        settings |= {"require_full_coverage": False, "retry": RedisRetry(NoBackoff(), _OTHER_PRIMARIES)}
        return lambda: _ClusterRoute(nodes, settings | tls)
    if not service:
        raise ConfigError(f"{redact_url(url)!r}: name the Sentinel service after the hosts, like .../mymaster/0")
    sentinel_settings = {k: v for k, v in settings.items() if k not in ("username", "password", "db", "driver_info")}
    sentinel_settings |= _no_setinfo(scheme, logs_in=False) | tls
    sentinel = Sentinel(nodes, sentinel_kwargs=sentinel_settings, **settings, **tls)
    return lambda: _SingleServerRoute(sentinel.master_for(service).connection_pool)
