"""Client: connections and scripts, by redis-py; `error_translation` translates its errors.

Replies are raw: bytes, integers and lists, as hiredis parses them, since the data path cannot afford more. redis-py's
own retries are switched off: a command whose reply was lost may have been executed, so the caller decides whether
repeating it is safe (`Client.retry_while_unavailable`).
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Self, TypeVar

import millstream.redis_client.redis_py  # noqa: F401 - before redis itself

# isort: split
import redis
from redis._parsers import BaseParser
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.connection import ConnectionPool
from redis.exceptions import AskError, MovedError, NoScriptError, SlotNotCoveredError

from millstream.clock import SYSTEM_CLOCK, Backoff, Clock, Every
from millstream.errors import (
    AccessDenied,
    ConfigError,
    MillstreamError,
    RedisError,
    ScriptMissing,
    Unavailable,
    WrongType,
)
from millstream.redis_client.call import Call, SentCall
from millstream.redis_client.deployments import _Route, _SingleNodeRoute, open_connection, parse_route
from millstream.redis_client.error_translation import (
    REDIS_ERRORS,
    breaks_connection,
    denies_key,
    keys_of,
    translate,
    with_denied_keys,
    wrong_type_error,
)
from millstream.redis_client.key_names import PREFIX, from_wire
from millstream.redis_client.outages import Outages
from millstream.redis_client.redaction import redact_url, register_secrets
from millstream.redis_client.resp import (
    Arg,
    Command,
    Node,
    Redirection,
    Reply,
    ReplySize,
    RespConnection,
    pack_all,
    pack_command,
    routing_key,
)
from millstream.redis_client.scripts import Script, with_texts
from millstream.redis_client.urls import Shard, url_of_node

T = TypeVar("T")

ScanPosition = tuple[int, bytes]
"""Where a scan goes on, also on another client of the same Redis: the number of the server, and the cursor there."""
SCAN_START: ScanPosition = (0, b"0")

_REDIRECTS = 8
_CALLS_PER_TRIP = 1_000
_SCAN_PAGE = 1_000
_UNCOVERED_MS = 1_000.0
_SKIP = ("CLIENT", "REPLY", "SKIP")


def raise_if_error(reply: Reply) -> Reply:
    """Return a reply of `Client.pipeline`, or raise it if it is an error."""
    if isinstance(reply, RedisError):
        raise reply
    return reply


class Client:
    """Connections to one Redis deployment, by `url`: a server, a Sentinel service or a cluster.

    Holds one connection per node, opened at first use. Threads may share it; their calls are serialized. `timeout_ms`
    bounds each wait for a reply. Raises ConfigError for an invalid URL, and RedisError for all other errors. After a call
    that another exception has interrupted, such as KeyboardInterrupt, it may be used on.
    """

    def __init__(self, url: str, *, timeout_ms: int = 15_000, clock: Clock = SYSTEM_CLOCK) -> None:
        register_secrets(url)
        self.url = url
        self.timeout_ms = timeout_ms
        self._clock = clock
        self._outages = Outages(clock)
        self._lock = threading.RLock()
        self._connections: dict[int, tuple[ConnectionPool, Any]] = {}
        self._cached_route: _Route | None = None
        self._sent: tuple[SentCall[Any], Any] | None = None
        self._unread = False
        """From before a command is sent until its reply is read; if an exception comes between, a later one would get it."""
        self._uncovered = Every(_UNCOVERED_MS)

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
            self._unread = True  # an exception may come before the last one is closed
            if self._sent is not None:
                self._sent[0].reply = Unavailable(f"a connection to Redis at {redact_url(self.url)} was closed")
                self._sent = None
            for pool, connection in self._connections.values():
                connection.disconnect()
                pool.release(connection)
            self._connections.clear()
            self._unread = False

    def __enter__(self) -> Self:
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

    def run(self, call: Call[T]) -> T:
        """Make one call; return its result, or raise the error. It is never retried."""
        (result,) = self.run_all([call])
        if isinstance(result, RedisError):
            raise result
        return result

    def run_all(self, calls: Sequence[Call[T]]) -> Iterator[T | RedisError]:
        """Make many calls, in few round trips; return an iterator of their results, or RedisErrors, in order.

        All calls are sent at once; a reply is parsed when its result is read. Raises Unavailable if a connection
        breaks, as `pipeline` does.
        """
        commands = [call.command for call in calls]
        pages = range(0, len(commands), _CALLS_PER_TRIP)
        replies = [reply for at in pages for reply in self.pipeline(commands[at : at + _CALLS_PER_TRIP])]
        return (call.resolve(reply) for call, reply in zip(calls, replies, strict=True))

    def send(self, call: Call[T]) -> SentCall[T]:
        """Send one call without waiting for its reply, which the next call of any thread reads at the latest.

        It is never retried, but for a script that the server lacks. With several nodes it waits. `SentCall.result`
        returns a RedisError; a ConfigError is raised.
        """
        sent = SentCall(call, self._await_reply)
        command = call.command
        with self._lock:
            try:
                pool = self._only_pool()
                if pool is None:
                    (sent.reply,) = self.pipeline([command])
                else:
                    self._receive_sent()
                    connection, packed = self._connection(pool), pack_command(command)
                    self._unread = True
                    self._translating_errors(lambda: connection.send_packed_command([packed]), command)
                    self._sent = sent, connection
                    self._unread = False
            except RedisError as error:
                sent.reply = error
        return sent

    def _await_reply(self, sent: SentCall[Any]) -> None:
        with self._lock:
            if self._sent is not None and self._sent[0] is sent:
                self._receive_sent()
            if isinstance(sent.reply, ScriptMissing):
                try:
                    (sent.reply,) = self.pipeline([sent.call.command])
                except RedisError as error:
                    sent.reply = error

    def _receive_sent(self) -> None:
        """Read the reply to the call that was sent without waiting, if there is one: it comes before any other.

        Closes the connections if others may come before that of the next command.
        """
        if self._unread:
            self.close()
        if self._sent is None:
            return
        sent, connection = self._sent
        command = sent.call.command
        self._unread = True
        try:
            reply = self._translating_errors(lambda: self._read(connection), command)
            self._sent, self._unread = None, False
            (sent.reply,) = self._resolve([reply], [command])
        except RedisError as error:
            self._sent, sent.reply = None, error

    def shard(self, key: Arg) -> Shard:
        """The primary and replicas that have `key`."""
        with self._lock:
            return self._translating_errors(lambda: self._route.shard(key), None)

    def execute_on_node_of(self, key: Arg, *command: Arg) -> Reply:
        """Run a keyless command on the primary that has `key`."""
        return self._execute_on(command, self._route_pool(key))

    def execute_on_any_primary(self, *command: Arg) -> Reply:
        """Run a keyless command on the first primary that is available. Raises the error of the last."""
        tried: dict[tuple[Any, Any], Unavailable] = {}
        with self._lock:
            while True:
                # An error may have discarded the route, and then the pools are others, perhaps of other primaries.
                pools = self._pools()
                places = {_place(pool): pool for pool in pools}
                place = next((one for one in places if one not in tried), None)
                if place is None:
                    raise [*tried.values()][-1]
                try:
                    return self._execute_on(command, places[place])
                except Unavailable as error:
                    tried[place] = error

    def execute_on_primaries(self, *command: Arg) -> list[tuple[str, Reply]]:
        """Run a keyless command on each primary; return each address (`HOST:PORT`, or a socket's path) with the reply.

        Raises the first error.
        """
        with self._lock:
            pools = self._pools()
            replies = [(pool, self._execute_on(command, pool)) for pool in pools]
            return [(_address(self._connection(pool)), reply) for pool, reply in replies]

    def pipeline(self, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
        """Run many commands in one round trip per node; return the replies in order, error replies as RedisError.

        Not a transaction. Scripts that a server lacks are sent once more with their text, after all others. If a
        connection breaks, or `meter` aborts, Unavailable is raised, and it is unknown which commands were executed.
        """
        replies = self._pipeline_by_node(commands, (), meter)
        if missing := [index for index, reply in enumerate(replies) if isinstance(reply, ScriptMissing)]:
            again = with_texts([commands[index] for index in missing], on_one_server=not self.is_cluster)
            for index, reply in zip(missing, self._pipeline_by_node(again, (), meter), strict=True):
                replies[index] = reply
        return replies

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
        return self.pipeline([script.command(keys, args) for script, keys, args in calls])

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
        with self._lock:
            by_hash = script.command(keys, args)
            for command in (by_hash, *with_texts([by_hash])):
                replies = self._exchange(self._route_pool(keys[0]), [command, ("WAIT", replicas, timeout_ms)])
                if not isinstance(replies[0], NoScriptError):
                    break
            if isinstance(replies[0], AskError):
                self._translating_errors(self._route.on_moved, command)
                raise Unavailable(f"the cluster at {redact_url(self.url)} has moved slots; try again")
            reply, confirmed = map(raise_if_error, self._resolve(replies, [command, command]))
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
        for names, _ in self._scan(SCAN_START, "MATCH", pattern, "COUNT", _SCAN_PAGE, "TYPE", "stream"):
            yield [from_wire(name) for name in names if not own or not name.startswith(own)]

    def scan_key_pages(self, pattern: str) -> Iterator[list[bytes]]:
        """Keys of any type, millstream's too, that match the glob `pattern`, page by page, unsorted, with duplicates."""
        return (names for names, _ in self.scan_keys_from(pattern, SCAN_START))

    def scan_keys_from(self, pattern: str, start: ScanPosition) -> Iterator[tuple[list[bytes], ScanPosition]]:
        """The pages of `scan_key_pages` from `start` on, each with the position at which the next one begins."""
        return self._scan(start, "MATCH", pattern, "COUNT", _SCAN_PAGE)

    def _scan(self, start: ScanPosition, *options: Arg) -> Iterator[tuple[list[bytes], ScanPosition]]:
        with self._lock:
            pools = self._pools()
        first, cursor = start
        for number, pool in enumerate(pools[first:], first):  # other threads may use the connection between two pages
            is_over = False
            while not is_over:
                cursor, names = self._execute_on(("SCAN", cursor, *options), pool)
                is_over = cursor == b"0"
                yield names, (number + is_over, cursor)

    # Waiting

    def retry_while_unavailable(
        self,
        operation: Callable[[], T],
        *,
        what: str,
        limit_ms: float | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> T:
        """Run `operation` until Redis answers. It must be idempotent.

        Waits with back-off (50 ms to 1 s) while Redis is Unavailable, and logs the start of the outage, its duration
        every five seconds, and its end: once for all threads that wait for the same `what`. After `limit_ms`
        milliseconds, or once `give_up` returns True, the last error is raised.
        """
        began = self._clock.monotonic_ms()
        backoff, is_waiting, is_answered, gives_up = Backoff(50, 1_000), False, False, False
        try:
            while True:
                try:
                    result = operation()
                except Unavailable as error:
                    waited_ms = self._clock.monotonic_ms() - began
                    gives_up = give_up() or (limit_ms is not None and waited_ms >= limit_ms)
                    if gives_up:
                        raise
                    if not is_waiting:
                        is_waiting = True
                        self._outages.begin(what, began)
                    self._outages.log(what, error)
                    self._clock.sleep_ms(backoff.next_ms())
                else:
                    is_answered = True
                    return result
        finally:
            if is_waiting:
                self._outages.end(what, is_answered=is_answered, gives_up=gives_up)

    def is_awaited_by(self, what: str) -> bool:
        """Return whether a thread waits in `retry_while_unavailable` for this `what`, which the log has then."""
        return what in self._outages

    # Internals

    def _route_pool(self, key: Arg | None) -> ConnectionPool:
        with self._lock:
            return self._translating_errors(lambda: self._route.pool(key), None)

    def _only_pool(self) -> ConnectionPool | None:
        """The only pool of a deployment with one server, so that commands need no routing; else None."""
        pools = self._pools()
        return pools[0] if len(pools) == 1 else None

    def _pools(self) -> list[ConnectionPool]:
        return self._translating_errors(lambda: list(self._route.pools()), None)

    def _connection(self, pool: ConnectionPool) -> Any:  # redis-py annotates only half of a connection
        opened = self._connections.get(id(pool))
        if opened is None:
            connection = self._translating_errors(lambda: open_connection(pool), None)
            self._connections[id(pool)] = opened = (pool, connection)
        return opened[1]

    def _execute_on(self, command: Command, pool: ConnectionPool) -> Reply:
        with self._lock:
            (reply,) = self._resolve(self._exchange(pool, [command]), [command])
        return raise_if_error(reply)

    def _pipeline_by_node(
        self, commands: Sequence[Command], silent: Sequence[Command], meter: ReplySize | None = None
    ) -> list[Reply]:
        """Send each command to its node. A command in `silent` precedes the one in `commands` with the same index."""
        with self._lock:
            return self._resolve(self._exchange_by_node(commands, silent, meter), commands, meter)

    def _exchange_by_node(
        self, commands: Sequence[Command], silent: Sequence[Command], meter: ReplySize | None
    ) -> list[Reply]:
        """`_exchange` with each node that has keys of `commands`; the replies are in the order of these."""
        if not commands:
            return []
        only_pool = self._only_pool()
        if only_pool is not None:
            return self._exchange(only_pool, commands, silent, meter)
        by_pool: dict[int, tuple[ConnectionPool, list[int]]] = {}
        for index, command in enumerate(commands):
            pool = self._route_pool(routing_key(command))
            by_pool.setdefault(id(pool), (pool, []))[1].append(index)
        replies: list[Reply] = [None] * len(commands)
        for pool, indexes in by_pool.values():
            some = [silent[i] for i in indexes if silent]
            batch = self._exchange(pool, [commands[i] for i in indexes], some, meter)
            for index, reply in zip(indexes, batch, strict=True):
                replies[index] = reply
        return replies

    def _discard_after_error(self, replies: Sequence[Reply]) -> None:
        """Discard the connections after an error among silent commands: one of these may have been answered."""
        self.close()
        if any(isinstance(reply, AskError) for reply in replies):
            self._translating_errors(self._route.on_moved, None)
            raise Unavailable(f"the cluster at {redact_url(self.url)} has moved slots; try again")

    def _exchange(
        self,
        pool: ConnectionPool,
        commands: Sequence[Command],
        silent: Sequence[Command] = (),
        meter: ReplySize | None = None,
    ) -> list[Reply]:
        """One write, then one read per command. Returns error replies as values; a broken connection raises."""
        self._receive_sent()
        connection = self._connection(pool)

        def exchange() -> list[Reply]:
            pairs = zip(silent, commands, strict=True)
            sent = pack_all([part for pair in pairs for part in (_SKIP, *pair)] if silent else commands)
            connection.send_packed_command([sent])  # one item: each would be a separate write
            if meter is not None:
                return meter.read_all(connection._sock, connection._parser._reader, NOT_ENOUGH_DATA, len(commands))
            return [self._read(connection) for _ in commands]

        self._unread = True
        replies = self._translating_errors(exchange, commands[0])
        if silent and any(isinstance(reply, Exception) for reply in replies):
            self._discard_after_error(replies)
        self._unread = False
        return replies

    @staticmethod
    def _read(connection: Any) -> Reply:
        try:
            return connection.read_response(disable_decoding=True)
        except (redis.exceptions.ConnectionError, redis.exceptions.ResponseError) as error:
            if breaks_connection(error):
                raise
            return error

    def _resolve(
        self, replies: list[Reply], commands: Sequence[Command], meter: ReplySize | None = None
    ) -> list[Reply]:
        """Follow a cluster's redirections; translate error replies. `replies` is changed."""
        errors = redirected = [index for index, reply in enumerate(replies) if isinstance(reply, Exception)]
        if not errors:
            return replies
        for _ in range(_REDIRECTS):
            redirected = [index for index in redirected if isinstance(replies[index], AskError)]
            if not redirected:
                break
            moved = [index for index in redirected if isinstance(replies[index], MovedError)]
            for index in redirected:
                if not isinstance(replies[index], MovedError):
                    replies[index] = self._ask(replies[index], commands[index])
            if moved:  # all are sent again together: reading the slots for each would take seconds
                self._translating_errors(self._route.on_moved, commands[moved[0]])
                again = self._exchange_by_node([commands[index] for index in moved], (), meter)
                for index, reply in zip(moved, again, strict=True):
                    replies[index] = reply
        for index in errors:
            replies[index] = self._translate_error(replies[index], commands[index])
        return replies

    def _ask(self, reply: AskError, command: Command) -> Reply:
        """Send `command` to the node that its slot is moving to."""
        pool = self._translating_errors(lambda: self._route.node_pool(reply.host, reply.port), command)
        return self._exchange(pool, [("ASKING",), command])[1]

    def _translate_error(self, reply: Reply, command: Command) -> Reply:
        if not isinstance(reply, redis.exceptions.RedisError):
            return reply  # of the node that it was redirected to
        if isinstance(reply, redis.exceptions.ReadOnlyError):
            self.close()  # the primary has moved: the next connection asks Sentinel again
        return self._add_key_name(translate(reply, self.url, command), str(reply), command)

    def _add_key_name(self, error: RedisError, text: str, command: Command) -> RedisError:
        """Add the key to a refusal if neither Redis nor the command names it, by TYPE of each key."""
        keys = keys_of(command)
        denied = isinstance(error, AccessDenied) and error.concerns_key
        vague = denied or (isinstance(error, WrongType) and not error.names_key)
        if not vague or not keys or (len(keys) == 1 and command[0] not in ("EVAL", "EVALSHA")):
            return error
        try:
            types = self._exchange(self._route_pool(keys[0]), [("TYPE", key) for key in keys])
        except RedisError:
            return error
        if denied:
            refused = [
                key
                for key, found in zip(keys, types, strict=True)
                if isinstance(found, Exception) and denies_key(str(found))
            ]
            unknown = all(isinstance(found, Exception) for found in types)
            return with_denied_keys(error, refused or keys) if refused or unknown else error
        known = {key: found.decode() for key, found in zip(keys, types, strict=True) if isinstance(found, bytes)}
        return wrong_type_error(text, command, known) or error

    def _translating_errors(self, action: Callable[[], T], command: Command | None) -> T:
        try:
            return action()
        except MillstreamError:
            raise
        except BaseException as error:
            # After a failover only a new connection finds the new primary; in a cluster, only newly read slots do.
            # A slot without an owner has broken no connection: whether it has one by now is read once a second.
            # After an interruption, as by Ctrl-C, replies may be unread, also those to redis-py's reads of the slots.
            if not isinstance(error, SlotNotCoveredError) or self._uncovered.is_due(self._clock.monotonic_ms()):
                self.close()
                if self.is_cluster:
                    self._cached_route = None
            if not isinstance(error, REDIS_ERRORS):
                raise
            raise translate(error, self.url, command) from error


def _place(pool: ConnectionPool) -> tuple[Any, Any]:
    return pool.connection_kwargs.get("host"), pool.connection_kwargs.get("port")


def _address(connection: Any) -> str:
    path = getattr(connection, "path", None)
    return str(path) if path else f"{connection.host}:{connection.port}"


@functools.cache
def shared_client(url: str) -> Client:
    """The process-wide client for `url`. Spark reuses its Python workers, and so this connection, for all batches."""
    return Client(url)
