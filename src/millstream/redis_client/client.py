"""The only module that talks to Redis by redis-py: connections and scripts. Its errors are put in our words in `translation`.

Replies are raw: bytes, integers and lists, as hiredis parses them, since the data path cannot afford more. redis-py's
own retries are switched off: a command whose reply was lost may have been executed, so repeating it is a decision
of the caller, who knows whether that is safe (`Client.patiently`).
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
    denied_keys,
    keys_of,
    known_scripts,
    translate,
    type_needed,
    wrong_type,
)
from millstream.redis_client.key_names import PREFIX, from_wire
from millstream.redis_client.lua import text_of
from millstream.redis_client.redaction import keep_secret, redact
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


# --- Addresses --------------------------------------------------------------------------------------------------


class _Route(Protocol):
    """Where a key's commands go. The three kinds of deployment differ in this only."""

    def pool(self, key: Arg | None) -> ConnectionPool: ...

    def pools(self) -> Iterable[ConnectionPool]: ...

    def moved(self) -> None: ...

    def node_pool(self, host: str, port: int) -> ConnectionPool: ...

    def shard(self, key: Arg) -> Shard: ...


class _OneServer:
    """A single server, or the primary that Sentinel names: one pool for everything."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    def pool(self, key: Arg | None) -> ConnectionPool:
        return self._pool

    def pools(self) -> Iterable[ConnectionPool]:
        return (self._pool,)

    def moved(self) -> None:
        raise ConfigError("this server is part of a Redis Cluster; connect with redis+cluster://HOST:PORT")

    def node_pool(self, host: str, port: int) -> ConnectionPool:
        return self._pool

    def shard(self, key: Arg) -> Shard:
        return Shard()


class _OneNode(_OneServer):
    """A server that is asked for what it has itself: in a cluster nobody is followed from there."""

    def moved(self) -> None:
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

    def moved(self) -> None:
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
    """What the plain `url` says of a connection. Raises ValueError also for what redis-py passes over, or finds late."""
    parts = urlsplit(url)
    try:
        _ = parts.port
    except ValueError:  # which quotes what may be a password
        raise ValueError("the port of a host is no number up to 65,535") from None
    settings = dict(parse_url(url))
    database = "" if parts.scheme == "unix" else parts.path.strip("/")
    if (database and not database.isdecimal()) or settings.get("db", 0) < 0:
        raise ValueError(f"{database or settings['db']!r} is no database; write its number, like /0")
    try:
        settings.get("connection_class", Connection)(
            **{name: value for name, value in settings.items() if name != "connection_class"}
        )
    except (TypeError, redis.exceptions.RedisError) as error:
        raise ValueError(f"an option after the '?' is unknown or wrong ({error})") from error
    return settings


def _quiet(scheme: str, *, logs_in: bool) -> dict[str, Any]:
    """No CLIENT SETINFO, if it can be helped: Redis 7.2 and later note it as refused for each user with the least rights.

    Over TLS, something has to be answered before redis-py calls a connection ready: it asks whether anything has come in
    unasked, and session tickets have. Who logs in is answered.
    """
    return {} if scheme == "rediss" and not logs_in else {"driver_info": None}


def route_to(url: str, timeout_ms: int) -> Callable[[], _Route]:
    """Understand every kind of URL. Raises ConfigError; nothing is connected to before the answer is called."""
    settings = dict(_NO_RETRY, retry=RedisRetry(NoBackoff(), 0), encoding_errors="surrogateescape")  # as `to_wire`
    settings |= {"socket_timeout": timeout_ms / 1000, "socket_connect_timeout": min(timeout_ms, 5000) / 1000}
    parts = split_url(url)
    scheme, _, kind = parts.scheme.partition("+")
    settings |= _quiet(scheme, logs_in="@" in parts.netloc)
    try:
        if not kind and scheme in ("redis", "rediss", "unix"):
            _connection_settings(url)
            return lambda: _OneServer(ConnectionPool.from_url(url, **settings))
        if kind not in ("sentinel", "cluster") or scheme not in ("redis", "rediss"):
            raise ConfigError(
                f"{redact(url)!r}: the URL must begin with redis://, rediss://, unix://, redis+sentinel:// or "
                "redis+cluster:// (rediss+... for TLS)"
            )
        nodes = hosts(parts.netloc, 26379 if kind == "sentinel" else 6379)
        service = parts.path.strip("/").partition("/")[0]  # Sentinel's
        if kind == "cluster" and service not in ("", "0"):
            raise ConfigError(f"{redact(url)!r}: Redis Cluster has database 0 only; leave out {parts.path!r}")
        of_one = _connection_settings(url_of_node(url, nodes[0]))
        settings |= {k: v for k, v in of_one.items() if k not in ("host", "port", "connection_class")}
    except ValueError as error:
        raise ConfigError(f"{redact(url)!r} is not a Redis URL: {error}") from None
    tls: dict[str, Any] = {"ssl": True} if scheme == "rediss" else {}
    if kind == "cluster":
        return lambda: _ClusterRoute(RedisCluster(startup_nodes=[ClusterNode(*n) for n in nodes], **settings, **tls))
    if not service:
        raise ConfigError(f"{redact(url)!r}: name the Sentinel service after the hosts, like .../mymaster/0")
    to_ask = {k: v for k, v in settings.items() if k not in ("username", "password", "db", "driver_info")}
    to_ask |= _quiet(scheme, logs_in=False) | tls
    sentinel = Sentinel(nodes, sentinel_kwargs=to_ask, **settings, **tls)
    return lambda: _OneServer(sentinel.master_for(service).connection_pool)


# --- Scripts ----------------------------------------------------------------------------------------------------


def raise_if_error(reply: Reply) -> Reply:
    """Return a reply of `Client.pipeline`, or raise it if it is an error."""
    if isinstance(reply, RedisError):
        raise reply
    return reply


class Script:
    """A Lua script in a file of `millstream.redis_client.lua`; called by its hash, loaded where a server lacks it.

    Content-addressed, so old and new versions run side by side during an upgrade (Redis EVALSHA). A line
    `-- include NAME` stands for the text of that file. `allow_oom`: it may run at maxmemory (Redis script flags).
    """

    def __init__(self, name: str, *, allow_oom: bool = False) -> None:
        self.name = name
        self._allow_oom = allow_oom

    @functools.cached_property
    def text(self) -> str:
        """All of it, read when it is first needed: no process needs every script."""
        text = text_of(self.name)
        return text.replace("#!lua", "#!lua flags=allow-oom", 1) if self._allow_oom else text

    @functools.cached_property
    def sha(self) -> str:
        """Its hash, by which Redis knows it."""
        sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        known_scripts[sha] = known_scripts[self.text] = self
        return sha


# --- The client -------------------------------------------------------------------------------------------------


class Client:
    """Connections to one Redis deployment: a server, a Sentinel service or a cluster, by `url`.

    Holds one connection per node, opened at first use. Safe to share between threads, which then take turns.
    `timeout_ms` bounds each wait for a reply. Raises ConfigError for a bad URL, RedisError for all else.
    """

    def __init__(self, url: str, *, timeout_ms: int = 15_000, clock: Clock = SYSTEM_CLOCK) -> None:
        keep_secret(url)
        self.url = url
        self.timeout_ms = timeout_ms
        self._clock = clock
        self._lock = threading.RLock()
        self._open: dict[int, tuple[ConnectionPool, Any]] = {}
        self._known_route: _Route | None = None

    def __repr__(self) -> str:
        return f"Client({redact(self.url)!r})"

    @property
    def _route(self) -> _Route:
        # A cluster is asked for its slots when the route is built, so building it may fail and be tried again.
        if self._known_route is None:
            self._known_route = self._guarded(route_to(self.url, self.timeout_ms), None)
        return self._known_route

    @property
    def is_cluster(self) -> bool:
        """True for Redis Cluster, where keys that change together must share a hash slot."""
        return "+cluster" in self.url.partition("://")[0]

    def close(self) -> None:
        """Close every connection; the client may be used again."""
        with self._lock:
            for pool, connection in self._open.values():
                connection.disconnect()
                pool.release(connection)
            self._open.clear()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dial(self, node: Node | None = None) -> RespConnection:
        """Open one more connection, for the caller to read as it likes; it is not followed through any redirection.

        `node`: of a cluster's, which; None: the server, or the primary that Sentinel names now. Raises RedisError.
        Error replies on it are of the classes that `execute` raises, or `Redirection`.
        """
        with self._lock:
            pool = self._guarded(lambda: self._route.node_pool(*node) if node else self._route.pool(None), None)

        def connect() -> RespConnection:
            connection = pool.connection_class(**pool.connection_kwargs)
            connection.connect()
            opened, connection._sock = connection._sock, None
            return RespConnection(opened, translate=self._refusal)

        return self._guarded(connect, None)

    def of_node(self, node: Node, *, timeout_ms: int) -> "Client":
        """A new client of this one server, whatever its role is: an answer is its own, or Unavailable. Raises ConfigError."""
        client = Client(url_of_node(self.url, node), timeout_ms=timeout_ms, clock=self._clock)
        client._known_route = _OneNode(route_to(client.url, timeout_ms)().pool(None))
        return client

    def _refusal(self, error: str | OSError) -> RedisError:
        if isinstance(error, str) and error.startswith(("MOVED ", "ASK ")):
            return Redirection(error)
        return translate(BaseParser.parse_error(error) if isinstance(error, str) else error, self.url, ("a read",))

    # Plain commands

    def execute(self, *command: Arg) -> Reply:
        """Run one command and return its raw reply. Never retried here."""
        return self._single(command, self._route_pool(routing_key(command)))

    def shard(self, key: Arg) -> Shard:
        """The nodes that have `key`."""
        with self._lock:
            return self._guarded(lambda: self._route.shard(key), None)

    def execute_beside(self, key: Arg, *command: Arg) -> Reply:
        """Run a keyless command on the primary that has `key`."""
        return self._single(command, self._route_pool(key))

    def pipeline(self, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
        """Run many commands in one round trip per node; replies in order, errors among them as RedisError.

        Not a transaction. If a connection breaks, or `meter` breaks off, Unavailable is raised and what was executed is not known.
        """
        return self._spread(commands, (), meter)

    def unanswered(self, pairs: Sequence[tuple[Command, Command]]) -> list[Reply]:
        """Run pairs of commands, in one round trip per node; only the second of each pair is answered.

        Lets a stream cursor skip a million entries at the server without their contents on the wire
        (Redis CLIENT REPLY SKIP). Both commands of a pair must be for one key. Replies as from `pipeline`.
        """
        return self._spread([asked for _, asked in pairs], [silent for silent, _ in pairs])

    def script(self, script: Script, keys: Sequence[Arg], args: Sequence[Arg]) -> Reply:
        """Run `script` in one atomic step. Its keys must share a hash slot on Redis Cluster."""
        return self.scripts([(script, keys, args)])[0]

    def scripts(self, calls: Sequence[tuple[Script, Sequence[Arg], Sequence[Arg]]]) -> list[Reply]:
        """Run several scripts in one round trip per node, each atomic by itself; the first error is raised."""
        return [raise_if_error(reply) for reply in self.each_script(calls)]

    def each_script(self, calls: Sequence[tuple[Script, Sequence[Arg], Sequence[Arg]]]) -> list[Reply]:
        """The same, with errors among the replies, as of `pipeline`."""
        replies = self.pipeline([("EVALSHA", s.sha, len(keys), *keys, *args) for s, keys, args in calls])
        for index, (script, keys, args) in enumerate(calls):
            reply = replies[index]
            if isinstance(reply, ScriptMissing):
                (replies[index],) = self.pipeline([("EVAL", script.text, len(keys), *keys, *args)])
        return replies

    def replicated_script(
        self, script: Script, keys: Sequence[Arg], args: Sequence[Arg], *, replicas: int, timeout_ms: int
    ) -> tuple[Reply, int]:
        """Run `script` and return its reply, and how many replicas confirmed it within `timeout_ms` (Redis WAIT).

        WAIT speaks of its own connection only, so both go out together. Unavailable is also raised where a cluster
        has moved the keys: nothing is confirmed then. Raises ConfigError for a time that this client cannot wait.
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
                self._guarded(self._route.moved, command)
                raise Unavailable(f"the cluster at {redact(self.url)} has moved slots; try again")
            reply, confirmed = (raise_if_error(self._settle(each, command)) for each in replies)
            return reply, confirmed

    def scan_streams(self, pattern: str = "*") -> list[str]:
        """Names of all streams that match the glob `pattern`, sorted, each once. Walks SCAN ... TYPE stream.

        millstream's own streams, such as dead letters, are left out unless the pattern begins with their prefix: a
        handler of all streams must not feed on its own dead letters.
        """
        return sorted(set(chain.from_iterable(self.scan_pages(pattern))))

    def scan_pages(self, pattern: str) -> Iterator[list[str]]:
        """The names of `scan_streams`, unsorted, some of them twice: a round trip for each page."""
        own = b"" if pattern.startswith(f"{PREFIX}:") else f"{PREFIX}:".encode()
        with self._lock:
            pools = list(self._route.pools())
        for pool in pools:  # between two pages others may have the connection
            cursor: Arg = "0"
            while cursor != b"0":
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", 1000, "TYPE", "stream")
                cursor, names = self._single(command, pool)
                yield [from_wire(name) for name in names if not own or not name.startswith(own)]

    # Waiting

    def patiently(
        self, operation: Callable[[], T], *, what: str, limit_ms: float | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> T:  # fmt: skip
        """Run `operation` until Redis answers; only for what may safely run twice.

        Waits with back-off (50 ms to 1 s) while Redis is Unavailable and logs a line when that begins, every
        five seconds, and when it ends. After `limit_ms` milliseconds, or once `give_up` says so, the last error is
        raised.
        """
        began = self._clock.monotonic_ms()
        wait_ms, next_word_ms = 50.0, 0.0
        while True:
            try:
                result = operation()
            except Unavailable as error:
                waited_ms = self._clock.monotonic_ms() - began
                if give_up() or (limit_ms is not None and waited_ms >= limit_ms):
                    raise
                if waited_ms >= next_word_ms:
                    logger.warning("%s is waiting for Redis (%.0f s so far): %s", what, waited_ms / 1000, error)
                    next_word_ms = waited_ms + 5000
                self._clock.sleep_ms(wait_ms)
                wait_ms = min(wait_ms * 2, 1000.0)
            else:
                if next_word_ms:
                    waited_ms = self._clock.monotonic_ms() - began
                    logger.warning("%s goes on: Redis answers again after %.1f s", what, waited_ms / 1000)
                return result

    # Inside

    def _route_pool(self, key: Arg | None) -> ConnectionPool:
        with self._lock:
            return self._guarded(lambda: self._route.pool(key), None)

    def _only_pool(self) -> ConnectionPool | None:
        """The pool of everything, if there is only one server: the way of every command need not be looked up."""
        pools = self._guarded(lambda: list(self._route.pools()), None)
        return pools[0] if len(pools) == 1 else None

    def _connection(self, pool: ConnectionPool) -> Any:  # redis-py annotates only half of a connection
        held = self._open.get(id(pool))
        if held is None:
            connection = self._guarded(pool.get_connection, None)
            self._open[id(pool)] = held = (pool, connection)
        return held[1]

    def _single(self, command: Command, pool: ConnectionPool) -> Reply:
        with self._lock:
            reply = self._settle(self._exchange(pool, [command])[0], command)
        return raise_if_error(reply)

    def _spread(
        self, commands: Sequence[Command], silent: Sequence[Command], meter: ReplySize | None = None
    ) -> list[Reply]:
        """Exchange with each node what concerns it; a command in `silent` precedes its namesake in `commands`."""
        with self._lock:
            by_pool: dict[int, tuple[ConnectionPool, list[int]]] = {}
            everything = self._only_pool()
            for index, command in enumerate(commands):
                pool = everything or self._route_pool(routing_key(command))
                by_pool.setdefault(id(pool), (pool, []))[1].append(index)
            replies: list[Reply] = [None] * len(commands)
            for pool, indexes in by_pool.values():
                some = [silent[i] for i in indexes if silent]
                batch = self._exchange(pool, [commands[i] for i in indexes], some, meter)
                if silent and any(isinstance(reply, Exception) for reply in batch):
                    self._refuse_silence(batch)
                for index, reply in zip(indexes, batch, strict=True):
                    replies[index] = self._settle(reply, commands[index])
            return replies

    def _refuse_silence(self, replies: Sequence[Reply]) -> None:
        """An error among silent exchanges: what was to be skipped may have been answered, or run elsewhere."""
        self.close()
        if any(isinstance(reply, AskError) for reply in replies):
            self._guarded(self._route.moved, None)
            raise Unavailable(f"the cluster at {redact(self.url)} has moved slots; try again")

    def _exchange(
        self, pool: ConnectionPool, commands: Sequence[Command], silent: Sequence[Command] = (), meter: ReplySize | None = None
    ) -> list[Reply]:  # fmt: skip
        """One write, then one read per command. Server errors come back as values, broken connections raise."""
        connection = self._connection(pool)

        def exchange() -> list[Reply]:
            parts: list[bytes] = []
            for index, command in enumerate(commands):
                if silent:
                    parts += (_SKIP, pack_command(silent[index]))
                parts.append(pack_command(command))
            connection.send_packed_command([b"".join(parts)])  # each item would be a write of its own
            return [self._read(connection, meter) for _ in commands]

        return self._guarded(exchange, commands[0])

    @staticmethod
    def _read(connection: Any, meter: ReplySize | None) -> Reply:
        try:
            if meter is not None:
                return meter.read(connection._sock, connection._parser._reader, NOT_ENOUGH_DATA)
            return connection.read_response(disable_decoding=True)
        except redis.exceptions.ConnectionError as error:
            # LOADING and the like are answers; a dead connection is not.
            if isinstance(error, (redis.exceptions.BusyLoadingError, redis.exceptions.AuthenticationError)):
                return error
            raise
        except redis.exceptions.ResponseError as error:
            return error

    def _settle(self, reply: Reply, command: Command) -> Reply:
        """Follow a cluster's redirections; translate an error reply."""
        for _ in range(_REDIRECTS):
            if not isinstance(reply, AskError):
                break
            if isinstance(reply, MovedError):
                self._guarded(self._route.moved, command)
                reply = self._exchange(self._route_pool(routing_key(command)), [command])[0]
            else:
                pool = self._route.node_pool(reply.host, reply.port)
                reply = self._exchange(pool, [("ASKING",), command])[1]
        if not isinstance(reply, redis.exceptions.RedisError):
            return reply
        if isinstance(reply, redis.exceptions.ReadOnlyError):
            self.close()  # the primary has moved: the next connection asks Sentinel again
        return self._naming_key(translate(reply, self.url, command), str(reply), command)

    def _naming_key(self, error: RedisError, text: str, command: Command) -> RedisError:
        """Find out which key a refusal is about, where neither Redis nor the command itself says so."""
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
            return denied_keys(error, refused or keys) if refused or unknown else error
        needed = type_needed(text, command)
        for key, found in zip(keys, types, strict=True):
            if isinstance(found, bytes) and found.decode() not in ("none", needed):
                return wrong_type(command, key, found.decode(), needed)
        return error

    def _guarded(self, action: Callable[[], T], command: Command | None) -> T:
        try:
            return action()
        except REDIS_ERRORS as error:
            # Whoever is the primary now, only a new connection finds out; in a cluster, only new slots.
            self.close()
            if self.is_cluster:
                self._known_route = None
            raise translate(error, self.url, command) from error


@functools.cache
def shared_client(url: str) -> Client:
    """The client of this process for `url`, opened once: Spark reuses its Python workers from batch to batch."""
    return Client(url)
