"""Client: connections and scripts. The only module that uses redis-py; `error_translation` translates its errors.

Replies are raw: bytes, integers and lists, as hiredis parses them, since the data path cannot afford more. redis-py's
own retries are switched off: a command whose reply was lost may have been executed, so the caller decides whether
repeating it is safe (`Client.retry_while_unavailable`).
"""

import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import redis
from redis._parsers import BaseParser
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import Connection, ConnectionPool, parse_url
from redis.exceptions import AskError, MovedError, NoScriptError
from redis.retry import Retry as RedisRetry
from redis.sentinel import Sentinel

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import AccessDenied, ConfigError, RedisError, ScriptMissing, Unavailable, WrongType
from millstream.redis_client import resp as wire
from millstream.redis_client.error_translation import (
    REDIS_ERRORS,
    keys_of,
    known_scripts,
    translate,
    type_needed,
    with_denied_keys,
    wrong_type_error,
)
from millstream.redis_client.key_names import PREFIX, from_wire
from millstream.redis_client.lua import text_of
from millstream.redis_client.redaction import redact_url, register_secrets
from millstream.redis_client.resp import Node, Redirection, ReplySize, RespConnection, pack_command, routing_key
from millstream.redis_client.urls import Shard, hosts, split_url, url_of_node

logger = logging.getLogger(__name__)

Arg = wire.Arg
Command = wire.Command
Reply = Any
T = TypeVar("T")

_REDIRECTS = 8
_SKIP = pack_command(("CLIENT", "REPLY", "SKIP"))
_NO_RETRY: dict[str, Any] = {"protocol": 2, "decode_responses": False, "health_check_interval": 0}


# --- Deployments ------------------------------------------------------------------------------------------------


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


class _ClusterRoute:
    """Redis Cluster: one pool per primary, chosen by the key's hash slot."""

    def __init__(self, cluster: RedisCluster) -> None:
        self._cluster = cluster

    def _pool_of(self, node: ClusterNode) -> ConnectionPool:
        pool: ConnectionPool = self._cluster.get_redis_connection(node).connection_pool
        return pool

    def pool(self, key: Arg | None) -> ConnectionPool:
        if key is None:
            return self._pool_of(self._cluster.get_primaries()[0])
        slot = self._cluster.keyslot(key)
        return self._pool_of(self._cluster.nodes_manager.get_node_from_slot(slot))

    def pools(self) -> Iterable[ConnectionPool]:
        return [self._pool_of(node) for node in self._cluster.get_primaries()]

    def on_moved(self) -> None:
        self._cluster.nodes_manager.initialize()

    def node_pool(self, host: str, port: int) -> ConnectionPool:
        node = self._cluster.get_node(host=host, port=port)
        if node is None:
            self._cluster.nodes_manager.initialize()
            node = self._cluster.get_node(host=host, port=port)
        if node is None:
            raise Unavailable(f"the cluster named {host}:{port}, which is not one of its nodes; try again")
        return self._pool_of(node)

    def shard(self, key: Arg) -> Shard:
        slot = self._cluster.keyslot(key)
        primary = self._cluster.nodes_manager.get_node_from_slot(slot)
        others = self._cluster.nodes_manager.slots_cache[slot][1:]
        return Shard((primary.host, primary.port), tuple((node.host, node.port) for node in others))


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
    try:
        settings.get("connection_class", Connection)(
            **{name: value for name, value in settings.items() if name != "connection_class"}
        )
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


def parse_route(url: str, timeout_ms: int) -> Callable[[], _Route]:
    """Parse a URL of any kind of deployment. Raises ConfigError; connects only when the returned function is called."""
    settings = dict(_NO_RETRY, retry=RedisRetry(NoBackoff(), 0), encoding_errors="surrogateescape")  # as `to_wire`
    settings |= {"socket_timeout": timeout_ms / 1000, "socket_connect_timeout": min(timeout_ms, 5000) / 1000}
    parts = split_url(url)
    scheme, _, kind = parts.scheme.partition("+")
    settings |= _no_setinfo(scheme, logs_in="@" in parts.netloc)
    try:
        if not kind and scheme in ("redis", "rediss", "unix"):
            _connection_settings(url)
            return lambda: _SingleServerRoute(ConnectionPool.from_url(url, **settings))
        if kind not in ("sentinel", "cluster") or scheme not in ("redis", "rediss"):
            raise ConfigError(
                f"{redact_url(url)!r}: the URL must begin with redis://, rediss://, unix://, redis+sentinel:// or "
                "redis+cluster:// (rediss+... for TLS)"
            )
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
        return lambda: _ClusterRoute(RedisCluster(startup_nodes=[ClusterNode(*n) for n in nodes], **settings, **tls))
    if not service:
        raise ConfigError(f"{redact_url(url)!r}: name the Sentinel service after the hosts, like .../mymaster/0")
    sentinel_settings = {k: v for k, v in settings.items() if k not in ("username", "password", "db", "driver_info")}
    sentinel_settings |= _no_setinfo(scheme, logs_in=False) | tls
    sentinel = Sentinel(nodes, sentinel_kwargs=sentinel_settings, **settings, **tls)
    return lambda: _SingleServerRoute(sentinel.master_for(service).connection_pool)


# --- Scripts ----------------------------------------------------------------------------------------------------


def raise_if_error(reply: Reply) -> Reply:
    """Return a reply of `Client.pipeline`, or raise it if it is an error."""
    if isinstance(reply, RedisError):
        raise reply
    return reply


class Script:
    """A Lua script in a file of `millstream.redis_client.lua`; called by its hash, and loaded if a server lacks it.

    Content-addressed, so old and new versions run side by side during an upgrade (Redis EVALSHA). A line
    `-- include NAME` is replaced by the text of that file. `allow_oom`: it may run at maxmemory (Redis script flags).
    """

    def __init__(self, name: str, *, allow_oom: bool = False) -> None:
        self.name = name
        self._allow_oom = allow_oom

    @functools.cached_property
    def text(self) -> str:
        """Its full text, read at first use, as no process needs every script."""
        text = text_of(self.name)
        return text.replace("#!lua", "#!lua flags=allow-oom", 1) if self._allow_oom else text

    @functools.cached_property
    def sha(self) -> str:
        """Its SHA-1 hash, by which Redis identifies it."""
        sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        known_scripts[sha] = known_scripts[self.text] = self
        return sha


# --- The client -------------------------------------------------------------------------------------------------


class Client:
    """Connections to one Redis deployment, by `url`: a server, a Sentinel service or a cluster.

    Holds one connection per node, opened at first use. Threads may share it; their calls are serialized. `timeout_ms`
    bounds each wait for a reply. Raises ConfigError for an invalid URL, and RedisError for all other errors.
    """

    def __init__(self, url: str, *, timeout_ms: int = 15_000, clock: Clock = SYSTEM_CLOCK) -> None:
        register_secrets(url)
        self.url = url
        self.timeout_ms = timeout_ms
        self._clock = clock
        self._lock = threading.RLock()
        self._connections: dict[int, tuple[ConnectionPool, Any]] = {}
        self._cached_route: _Route | None = None

    def __repr__(self) -> str:
        return f"Client({redact_url(self.url)!r})"

    @property
    def _route(self) -> _Route:
        # Building the route of a cluster reads its slots, so it may fail and be tried again.
        if self._cached_route is None:
            self._cached_route = self._translating_errors(parse_route(self.url, self.timeout_ms), None)
        return self._cached_route

    @property
    def is_cluster(self) -> bool:
        """True for Redis Cluster, where keys of one script or transaction must share a hash slot."""
        return "+cluster" in self.url.partition("://")[0]

    def close(self) -> None:
        """Close every connection; the client may be used again."""
        with self._lock:
            for pool, connection in self._connections.values():
                connection.disconnect()
                pool.release(connection)
            self._connections.clear()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dial(self, node: Node | None = None) -> RespConnection:
        """Open one more connection, which the caller reads itself; redirections are not followed.

        `node`: a node of a cluster; None: the server, or the primary that Sentinel names now. Error replies on it are
        of the classes that `execute` raises, or `Redirection`. Raises RedisError.
        """
        with self._lock:
            pool = self._translating_errors(
                lambda: self._route.node_pool(*node) if node else self._route.pool(None), None
            )

        def connect() -> RespConnection:
            connection = pool.connection_class(**pool.connection_kwargs)
            connection.connect()
            opened, connection._sock = connection._sock, None
            return RespConnection(opened, translate=self._translate_reply)

        return self._translating_errors(connect, None)

    def node_client(self, node: Node, *, timeout_ms: int) -> "Client":
        """A new client of one node, primary or replica; redirections raise Unavailable. Raises ConfigError."""
        client = Client(url_of_node(self.url, node), timeout_ms=timeout_ms, clock=self._clock)
        client._cached_route = _SingleNodeRoute(parse_route(client.url, timeout_ms)().pool(None))
        return client

    def _translate_reply(self, error: str | OSError) -> RedisError:
        if isinstance(error, str) and error.startswith(("MOVED ", "ASK ")):
            return Redirection(error)
        return translate(BaseParser.parse_error(error) if isinstance(error, str) else error, self.url, ("a read",))

    # Plain commands

    def execute(self, *command: Arg) -> Reply:
        """Run one command and return its raw reply. It is never retried."""
        return self._execute_on(command, self._route_pool(routing_key(command)))

    def shard(self, key: Arg) -> Shard:
        """The primary and replicas that have `key`."""
        with self._lock:
            return self._translating_errors(lambda: self._route.shard(key), None)

    def execute_on_node_of(self, key: Arg, *command: Arg) -> Reply:
        """Run a keyless command on the primary that has `key`."""
        return self._execute_on(command, self._route_pool(key))

    def pipeline(self, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
        """Run many commands in one round trip per node; return the replies in order, error replies as RedisError.

        Not a transaction. If a connection breaks, or `meter` aborts, Unavailable is raised, and it is unknown which
        commands were executed.
        """
        return self._pipeline_by_node(commands, (), meter)

    def pipeline_skipping(self, pairs: Sequence[tuple[Command, Command]]) -> list[Reply]:
        """Run pairs of commands in one round trip per node; only the second command of each pair is answered.

        A stream cursor skips a million entries at the server this way, without their contents on the wire (Redis
        CLIENT REPLY SKIP). Both commands of a pair must be for one key. Returns replies like `pipeline`.
        """
        return self._pipeline_by_node([answered for _, answered in pairs], [silent for silent, _ in pairs])

    def script(self, script: Script, keys: Sequence[Arg], args: Sequence[Arg]) -> Reply:
        """Run `script` in one atomic step. Its keys must share a hash slot on Redis Cluster."""
        return self.scripts([(script, keys, args)])[0]

    def scripts(self, calls: Sequence[tuple[Script, Sequence[Arg], Sequence[Arg]]]) -> list[Reply]:
        """Run several scripts in one round trip per node, each atomic by itself. Raises the first error."""
        return [raise_if_error(reply) for reply in self.try_scripts(calls)]

    def try_scripts(self, calls: Sequence[tuple[Script, Sequence[Arg], Sequence[Arg]]]) -> list[Reply]:
        """Like `scripts`, but returns error replies as RedisError, like `pipeline`."""
        replies = self.pipeline([("EVALSHA", s.sha, len(keys), *keys, *args) for s, keys, args in calls])
        for index, (script, keys, args) in enumerate(calls):
            reply = replies[index]
            if isinstance(reply, ScriptMissing):
                (replies[index],) = self.pipeline([("EVAL", script.text, len(keys), *keys, *args)])
        return replies

    def replicated_script(
        self, script: Script, keys: Sequence[Arg], args: Sequence[Arg], *, replicas: int, timeout_ms: int
    ) -> tuple[Reply, int]:
        """Run `script`; return its reply and the number of replicas that confirmed it within `timeout_ms` (Redis WAIT).

        WAIT covers the writes of its own connection only, so both are sent together. Raises Unavailable also if a
        cluster has moved the keys, as nothing is confirmed then, and ConfigError for a `timeout_ms` beyond the client's
        own.
        """
        if not 0 < timeout_ms < self.timeout_ms:
            raise ConfigError(f"a wait for replicas of {timeout_ms} ms: use 1 to {self.timeout_ms - 1:,}")
        rest = (len(keys), *keys, *args)
        with self._lock:
            for command in (("EVALSHA", script.sha, *rest), ("EVAL", script.text, *rest)):
                replies = self._exchange(self._route_pool(keys[0]), [command, ("WAIT", replicas, timeout_ms)])
                if not isinstance(replies[0], NoScriptError):
                    break
            if isinstance(replies[0], AskError):
                self._translating_errors(self._route.on_moved, command)
                raise Unavailable(f"the cluster at {redact_url(self.url)} has moved slots; try again")
            reply, confirmed = (raise_if_error(self._resolve_reply(each, command)) for each in replies)
            return reply, confirmed

    def scan_streams(self, pattern: str = "*") -> list[str]:
        """Names of all streams that match the glob `pattern`, sorted, without duplicates (SCAN ... TYPE stream).

        millstream's own streams, such as dead letters, are excluded unless the pattern begins with their prefix: a
        handler of all streams must not read its own dead letters.
        """
        return sorted(set(chain.from_iterable(self.scan_pages(pattern))))

    def scan_pages(self, pattern: str) -> Iterator[list[str]]:
        """The names of `scan_streams`, page by page, unsorted and with duplicates: one round trip per page."""
        own = b"" if pattern.startswith(f"{PREFIX}:") else f"{PREFIX}:".encode()
        with self._lock:
            pools = list(self._route.pools())
        for pool in pools:  # other threads may use the connection between two pages
            cursor: Arg = "0"
            while cursor != b"0":
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", 1000, "TYPE", "stream")
                cursor, names = self._execute_on(command, pool)
                yield [from_wire(name) for name in names if not own or not name.startswith(own)]

    # Waiting

    def retry_while_unavailable(
        self, operation: Callable[[], T], *, what: str, limit_ms: float | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> T:  # fmt: skip
        """Run `operation` until Redis answers. It must be idempotent.

        Waits with back-off (50 ms to 1 s) while Redis is Unavailable, and logs the start of the outage, its duration
        every five seconds, and its end. After `limit_ms` milliseconds, or once `give_up` returns True, the last error
        is raised.
        """
        began = self._clock.monotonic_ms()
        wait_ms, next_log_ms = 50.0, 0.0
        while True:
            try:
                result = operation()
            except Unavailable as error:
                waited_ms = self._clock.monotonic_ms() - began
                if give_up() or (limit_ms is not None and waited_ms >= limit_ms):
                    raise
                if waited_ms >= next_log_ms:
                    logger.warning("%s is waiting for Redis (%.0f s so far): %s", what, waited_ms / 1000, error)
                    next_log_ms = waited_ms + 5000
                self._clock.sleep_ms(wait_ms)
                wait_ms = min(wait_ms * 2, 1000.0)
            else:
                if next_log_ms:
                    waited_ms = self._clock.monotonic_ms() - began
                    logger.warning("%s resumes: Redis is available again after %.1f s", what, waited_ms / 1000)
                return result

    # Internals

    def _route_pool(self, key: Arg | None) -> ConnectionPool:
        with self._lock:
            return self._translating_errors(lambda: self._route.pool(key), None)

    def _only_pool(self) -> ConnectionPool | None:
        """The only pool of a deployment with one server, so that commands need no routing; else None."""
        pools = self._translating_errors(lambda: list(self._route.pools()), None)
        return pools[0] if len(pools) == 1 else None

    def _connection(self, pool: ConnectionPool) -> Any:  # redis-py annotates only half of a connection
        opened = self._connections.get(id(pool))
        if opened is None:
            connection = self._translating_errors(pool.get_connection, None)
            self._connections[id(pool)] = opened = (pool, connection)
        return opened[1]

    def _execute_on(self, command: Command, pool: ConnectionPool) -> Reply:
        with self._lock:
            reply = self._resolve_reply(self._exchange(pool, [command])[0], command)
        return raise_if_error(reply)

    def _pipeline_by_node(
        self, commands: Sequence[Command], silent: Sequence[Command], meter: ReplySize | None = None
    ) -> list[Reply]:
        """Send each command to its node. A command in `silent` precedes the one in `commands` with the same index."""
        with self._lock:
            by_pool: dict[int, tuple[ConnectionPool, list[int]]] = {}
            only_pool = self._only_pool()
            for index, command in enumerate(commands):
                pool = only_pool or self._route_pool(routing_key(command))
                by_pool.setdefault(id(pool), (pool, []))[1].append(index)
            replies: list[Reply] = [None] * len(commands)
            for pool, indexes in by_pool.values():
                some = [silent[i] for i in indexes if silent]
                batch = self._exchange(pool, [commands[i] for i in indexes], some, meter)
                if silent and any(isinstance(reply, Exception) for reply in batch):
                    self._discard_after_error(batch)
                for index, reply in zip(indexes, batch, strict=True):
                    replies[index] = self._resolve_reply(reply, commands[index])
            return replies

    def _discard_after_error(self, replies: Sequence[Reply]) -> None:
        """Discard the connections after an error among silent commands: one of these may have been answered."""
        self.close()
        if any(isinstance(reply, AskError) for reply in replies):
            self._translating_errors(self._route.on_moved, None)
            raise Unavailable(f"the cluster at {redact_url(self.url)} has moved slots; try again")

    def _exchange(
        self, pool: ConnectionPool, commands: Sequence[Command], silent: Sequence[Command] = (), meter: ReplySize | None = None
    ) -> list[Reply]:  # fmt: skip
        """One write, then one read per command. Returns error replies as values; a broken connection raises."""
        connection = self._connection(pool)

        def exchange() -> list[Reply]:
            parts: list[bytes] = []
            for index, command in enumerate(commands):
                if silent:
                    parts += (_SKIP, pack_command(silent[index]))
                parts.append(pack_command(command))
            connection.send_packed_command([b"".join(parts)])  # one item: each would be a separate write
            return [self._read(connection, meter) for _ in commands]

        return self._translating_errors(exchange, commands[0])

    @staticmethod
    def _read(connection: Any, meter: ReplySize | None) -> Reply:
        try:
            if meter is not None:
                return meter.read(connection._sock, connection._parser._reader, NOT_ENOUGH_DATA)
            return connection.read_response(disable_decoding=True)
        except redis.exceptions.ConnectionError as error:
            # redis-py's ConnectionError includes LOADING and the like, which are replies and not broken connections.
            if isinstance(error, (redis.exceptions.BusyLoadingError, redis.exceptions.AuthenticationError)):
                return error
            raise
        except redis.exceptions.ResponseError as error:
            return error

    def _resolve_reply(self, reply: Reply, command: Command) -> Reply:
        """Follow a cluster's redirections; translate an error reply."""
        for _ in range(_REDIRECTS):
            if not isinstance(reply, AskError):
                break
            if isinstance(reply, MovedError):
                self._translating_errors(self._route.on_moved, command)
                reply = self._exchange(self._route_pool(routing_key(command)), [command])[0]
            else:
                pool = self._route.node_pool(reply.host, reply.port)
                reply = self._exchange(pool, [("ASKING",), command])[1]
        if not isinstance(reply, redis.exceptions.RedisError):
            return reply
        if isinstance(reply, redis.exceptions.ReadOnlyError):
            self.close()  # the primary has moved: the next connection asks Sentinel again
        return self._add_key_name(translate(reply, self.url, command), str(reply), command)

    def _add_key_name(self, error: RedisError, text: str, command: Command) -> RedisError:
        """Add the key to a refusal if neither Redis nor the command names it, by TYPE of each key."""
        keys = keys_of(command)
        denied = isinstance(error, AccessDenied) and error.concerns_key
        vague = denied or (isinstance(error, WrongType) and " holds a " not in str(error))
        if not vague or not keys or (len(keys) == 1 and command[0] not in ("EVAL", "EVALSHA")):
            return error
        try:
            types = self._exchange(self._route_pool(keys[0]), [("TYPE", key) for key in keys])
        except RedisError:
            return error
        if denied:
            refused = [key for key, found in zip(keys, types, strict=True) if "access" in str(found)]
            unknown = all(isinstance(found, Exception) for found in types)
            return with_denied_keys(error, refused or keys) if refused or unknown else error
        needed = type_needed(text, command)
        for key, found in zip(keys, types, strict=True):
            if isinstance(found, bytes) and found.decode() not in ("none", needed):
                return wrong_type_error(command, key, found.decode(), needed)
        return error

    def _translating_errors(self, action: Callable[[], T], command: Command | None) -> T:
        try:
            return action()
        except REDIS_ERRORS as error:
            # After a failover only a new connection finds the new primary; in a cluster, only newly read slots do.
            self.close()
            if self.is_cluster:
                self._cached_route = None
            raise translate(error, self.url, command) from error


@functools.cache
def shared_client(url: str) -> Client:
    """The process-wide client for `url`. Spark reuses its Python workers, and so this connection, for all batches."""
    return Client(url)
