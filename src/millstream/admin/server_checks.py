"""Checks of the settings of Redis that may lose data or stop writes. `millstream doctor` runs all of them.

`warn_of_data_loss` runs those that concern data loss at the start of workers, runs and masters.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from millstream.admin.findings import Finding, run_check
from millstream.errors import AccessDenied, RedisError, Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.formats import format_time
from millstream.redis_client.redaction import redact_url
from millstream.redis_client.replies import fields_of_info, mapping_of

logger = logging.getLogger(__name__)

_MIN_VERSION, _MENDED_VALKEY = (7, 0), (9, 1)
_SETTINGS = (
    "appendfsync",
    "save",
    "min-replicas-to-write",
    "client-output-buffer-limit",
    "timeout",
    "maxclients",
    "repl-backlog-size",
    "aof-load-truncated",
    "stream-node-max-bytes",
    "stream-node-max-entries",
)
_FULL_SHARE, _MACHINE_SHARE = 0.8, 2 / 3
_MIN_CLIENTS, _DEFAULT_CLIENTS = 1_000, 10_000
_MIN_BACKLOG_BYTES, _BACKLOG_BYTES = 64 * 2**20, 256 * 2**20
_NODE_LIMITS = {"stream-node-max-bytes": 4_096, "stream-node-max-entries": 100}
_READ_BYTES = 64 * 2**20  # what a worker reads at once by default (--prefetch-mb)
_START_TIMEOUT_MS = 3_000
_SETTING = frozenset(("cmdstat_config|set", "cmdstat_config|resetstat"))


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """One primary, by its own replies.

    * `cli`: the redis-cli command that reaches it; `name`: its address where there are several primaries, else ""
    * `info`: the fields of INFO; `settings`: reads those of CONFIG GET, which many users may not
    * `calls`: reads those of INFO COMMANDSTATS
    """

    cli: str
    name: str
    info: Mapping[str, str]
    settings: Callable[[], Mapping[str, str]]
    calls: Callable[[], Mapping[str, str]]

    def setting(self, name: str) -> str:
        """A setting. Raises RedisError if Redis refuses CONFIG GET."""
        return self.settings().get(name, "")

    def number(self, name: str) -> int:
        """A number in INFO; 0 if it is missing."""
        return int(self.info.get(name, "0"))

    @property
    def unchanged_since_ms(self) -> int | None:
        """Since when its settings have been as they are, in Unix milliseconds: its start.

        None if a setting was set since then, or if that is unknown.
        """
        try:
            calls = self.calls()
        except RedisError:
            return None
        # It counts all calls since the start, or since the last CONFIG RESETSTAT, which it then counts.
        if "cmdstat_info" not in calls or not _SETTING.isdisjoint(calls) or not self.number("server_time_usec"):
            return None
        return self.number("server_time_usec") // 1_000 - self.number("uptime_in_seconds") * 1_000

    @property
    def out_of_memory_since_ms(self) -> int | None:
        """Since when it has needed more than maxmemory, in Unix milliseconds; None if it does not, or does not tell."""
        ms, now_ms = self.number("current_eviction_exceeded_time"), self.number("server_time_usec") // 1_000
        return now_ms - ms if ms and now_ms else None

    @property
    def product(self) -> str:
        """Its name and version."""
        redis, valkey = self.info.get("redis_version", "0"), self.info.get("valkey_version")
        return f"Valkey {valkey} (as Redis {redis})" if valkey else f"Redis {redis}"

    @property
    def where(self) -> str:
        """The subject of a sentence about it."""
        return f"Redis at {self.name}" if self.name else "Redis"


def read_servers(client: Client) -> list[Server]:
    """Each primary of the deployment. Raises RedisError. CONFIG GET is sent when a setting is first needed."""
    replies = client.execute_on_primaries("INFO")

    @functools.cache
    def settings() -> Mapping[str, Mapping[str, str]]:
        found = client.execute_on_primaries("CONFIG", "GET", *_SETTINGS)
        return {address: mapping_of([part.decode("utf-8", "replace") for part in reply]) for address, reply in found}

    @functools.cache
    def calls() -> Mapping[str, Mapping[str, str]]:
        found = client.execute_on_primaries("INFO", "COMMANDSTATS")
        return {address: fields_of_info(reply) for address, reply in found}

    return [
        Server(
            cli=redis_cli(client.url, address),
            name=address if len(replies) > 1 else "",
            info=fields_of_info(reply),
            settings=functools.partial(_fields_of, settings, address),
            calls=functools.partial(_fields_of, calls, address),
        )
        for address, reply in replies
    ]


def memory_problems(client: Client) -> tuple[str, ...]:
    """A line for each primary that refuses writes for want of memory; none where this user may not see it.

    Raises RedisError, except AccessDenied.
    """
    try:
        servers = read_servers(client)
    except AccessDenied:
        return ()
    found = [one for server in servers for one in check_memory(server) if one.severity == "problem"]
    return tuple(f"{one.what}: {one.why}" for one in found)


def warn_of_data_loss(client: Client) -> None:
    """Log a warning for each setting of Redis that loses data, with the command that mends it.

    A failed check stops no start: it is only logged. Raises AccessDenied if Redis refuses the credentials.
    """
    try:
        servers = read_servers(client)
    except AccessDenied as error:
        if error.concerns_credentials:
            raise
        logger.warning("cannot check whether Redis may lose data: the Redis user has no right to `info`")
        return
    except RedisError as error:
        logger.debug("cannot check whether Redis may lose data: %s", error)
        return
    for server in servers:
        for check in (check_eviction, check_persistence):
            for found in run_check("", functools.partial(check, server)):
                if found.severity == "problem":
                    logger.warning(
                        "%s (%s): %s; %s", found.what, redact_url(client.url), found.why, "; ".join(found.mend)
                    )
                elif not found.is_checked:
                    logger.debug("cannot check whether Redis may lose data: %s", found.what)


def warn_of_data_loss_at(url: str) -> None:
    """Like `warn_of_data_loss`, on a short-lived connection. Raises also ConfigError, for an invalid URL."""
    with Client(url, timeout_ms=_START_TIMEOUT_MS) as client:
        warn_of_data_loss(client)


# --- The checks, each of one server ---


def check_version(server: Server) -> Iterator[Finding]:
    """Redis 7.0 or later, or Valkey."""
    if _numbers(server.info.get("redis_version", "0")) < _MIN_VERSION:
        yield Finding(
            check="version",
            severity="problem",
            what=f"{server.product} is too old",
            why="scripts of millstream need Redis 7.0 or later, or Valkey",
        )
    else:
        yield Finding(check="version", severity="ok", what=server.product)


def check_role(server: Server) -> Iterator[Finding]:
    """The server is a primary."""
    if server.info.get("role", "master") != "master":
        yield Finding(
            check="role",
            severity="problem",
            what=f"{server.where} is a replica",
            why="it refuses writes",
            mend=("millstream doctor --url redis+sentinel://HOST:26379/NAME/0  # or the URL of its primary",),
        )


def check_cluster(server: Server, *, is_cluster: bool) -> Iterator[Finding]:
    """A server of a cluster is reached as such."""
    if server.info.get("cluster_enabled") == "1" and not is_cluster:
        yield Finding(
            check="cluster",
            severity="problem",
            what=f"{server.where} is part of a Redis Cluster",
            why="a client of one server reaches the keys of that server only",
            mend=("millstream doctor --url redis+cluster://HOST:PORT",),
        )


def check_eviction(server: Server) -> Iterator[Finding]:
    """Redis keeps its keys at maxmemory."""
    policy, limit = server.info.get("maxmemory_policy", "noeviction"), server.number("maxmemory")
    if policy == "noeviction":
        yield Finding(check="eviction", severity="ok", what="maxmemory-policy noeviction")
        return
    mend = (f"{server.cli} CONFIG SET maxmemory-policy noeviction",)
    if limit:
        yield Finding(
            check="eviction",
            severity="problem",
            since_ms=server.unchanged_since_ms,
            what=f"{server.where} evicts keys at maxmemory (maxmemory-policy {policy})",
            why="messages, states and progress would be lost silently",
            mend=mend,
        )
    else:
        yield Finding(
            check="eviction",
            severity="warning",
            since_ms=server.unchanged_since_ms,
            what=f"{server.where} has maxmemory-policy {policy}",
            why="as soon as it has a maxmemory, it loses messages, states and progress silently",
            mend=mend,
        )


def check_persistence(server: Server) -> Iterator[Finding]:
    """Redis writes its data to disk."""
    mend = (f"{server.cli} CONFIG SET appendonly yes",)
    if server.info.get("aof_enabled") == "1":
        yield Finding(check="persistence", severity="ok", what="append-only file")
    elif server.setting("save"):
        yield Finding(
            check="persistence",
            severity="warning",
            since_ms=server.unchanged_since_ms,
            what=f"{server.where} writes snapshots only (appendonly no, save {server.setting('save')})",
            why="a Redis that dies loses all since its last snapshot: messages, states and progress",
            mend=mend,
        )
    else:
        yield Finding(
            check="persistence",
            severity="problem",
            since_ms=server.unchanged_since_ms,
            what=f'{server.where} writes nothing to disk (appendonly no, save "")',
            why="a restart loses all messages, states and progress",
            mend=mend,
        )


def check_sync(server: Server) -> Iterator[Finding]:
    """The append-only file reaches the disk within a second."""
    if server.info.get("aof_enabled") == "1" and server.setting("appendfsync") == "no":
        yield Finding(
            check="sync",
            severity="warning",
            what=f"{server.where} has appendfsync no",
            why="a machine that fails loses what its kernel had not written, up to half a minute",
            mend=(f"{server.cli} CONFIG SET appendfsync everysec",),
        )


def check_truncated(server: Server) -> Iterator[Finding]:
    """A Redis that died in mid-write does not start with a part of a transaction."""
    is_mended = "valkey_version" in server.info and _numbers(server.info["valkey_version"]) >= _MENDED_VALKEY
    if not is_mended and server.info.get("aof_enabled") == "1" and server.setting("aof-load-truncated") == "yes":
        yield Finding(
            check="truncated",
            severity="warning",
            what=f"{server.where} has aof-load-truncated yes",
            why="if it dies in mid-write (kill -9, out of memory, power), it keeps a part of the last transaction in its file, "
            "and the start after the next applies that: effects come twice, or messages stay pending",
            mend=(
                f"{server.cli} CONFIG SET aof-load-truncated no  # it then starts after: redis-check-aof --fix MANIFEST",
            ),
        )


def check_disk(server: Server) -> Iterator[Finding]:
    """The last writes to disk have succeeded."""
    saved_ms = 1_000 * server.number("rdb_last_save_time")
    for field, thing, since_ms in (
        ("aof_last_write_status", "append to the append-only file", None),
        ("aof_last_bgrewrite_status", "rewrite of the append-only file", None),
        ("rdb_last_bgsave_status", "snapshot", saved_ms or None),
    ):
        if server.info.get(field, "ok") != "ok":
            success = f"; none has succeeded since {format_time(since_ms)}" if since_ms else ""
            yield Finding(
                check="disk",
                severity="problem",
                since_ms=since_ms,
                what=f"the last {thing} of {server.where} failed ({field}){success}",
                why="Redis may refuse writes, and a restart loses what is not on disk",
                mend=("df -h",),
            )


def check_replicas(server: Server) -> Iterator[Finding]:
    """A primary that has lost its replicas refuses writes, which a failover would lose."""
    replicas = server.number("connected_slaves")
    if replicas and server.setting("min-replicas-to-write") in ("", "0"):
        yield Finding(
            check="replicas",
            severity="warning",
            what=f"{server.where} has {replicas} connected replicas and min-replicas-to-write 0",
            why="a primary that is cut off goes on accepting writes, which a failover loses",
            mend=(f"{server.cli} CONFIG SET min-replicas-to-write 1",),
        )


def check_memory(server: Server) -> Iterator[Finding]:
    """Redis has room for more."""
    used, limit, machine = (server.number(name) for name in ("used_memory", "maxmemory", "total_system_memory"))
    if limit and used > _FULL_SHARE * limit:
        yield Finding(
            check="memory",
            severity="problem" if used >= limit else "warning",
            since_ms=server.out_of_memory_since_ms,
            what=f"{server.where} uses {used / limit:.0%} of maxmemory ({limit:,} bytes)",
            why="at maxmemory it refuses writes: producers and handlers with effects wait",
            mend=(
                f"{server.cli} CONFIG SET maxmemory {_more_memory(server)}  # or trim: millstream worker APP --trim",
            ),
        )
    elif not limit and machine:
        yield Finding(
            check="memory",
            severity="warning",
            since_ms=server.unchanged_since_ms,
            what=f"{server.where} has no maxmemory and uses {used / machine:.0%} of its machine's memory",
            why="the kernel kills a Redis that fills the machine's memory",
            mend=(f"{server.cli} CONFIG SET maxmemory {int(_MACHINE_SHARE * machine)}",),
        )
    else:
        bound = f"{used / limit:.0%} of maxmemory" if limit else "no maxmemory"
        yield Finding(check="memory", severity="ok", what=f"{used:,} bytes used, {bound}")


def _more_memory(server: Server) -> int:
    """Twice as much as now, if the machine has it."""
    used, limit, machine = (server.number(name) for name in ("used_memory", "maxmemory", "total_system_memory"))
    most = int(_MACHINE_SHARE * machine) or 2 * max(limit, used)
    return max(min(2 * max(limit, used), most), limit + 1)


def check_timeout(server: Server) -> Iterator[Finding]:
    """Redis keeps idle connections open."""
    timeout = server.setting("timeout")
    if timeout not in ("", "0"):
        yield Finding(
            check="timeout",
            severity="warning",
            what=f"{server.where} ends connections that are idle for {timeout} s",
            why="workers, routers and followers wait on idle connections, and connect again and again",
            mend=(f"{server.cli} CONFIG SET timeout 0",),
        )


def check_clients(server: Server) -> Iterator[Finding]:
    """Redis has room for the connections of workers."""
    limit = int(server.setting("maxclients") or _DEFAULT_CLIENTS)
    if limit < _MIN_CLIENTS:
        yield Finding(
            check="clients",
            severity="warning",
            what=f"{server.where} accepts {limit:,} connections (maxclients)",
            why="a worker process has about ten connections; beyond the limit Redis refuses the next one",
            mend=(f"{server.cli} CONFIG SET maxclients {_DEFAULT_CLIENTS}",),
        )


def check_backlog(server: Server) -> Iterator[Finding]:
    """A replica that was disconnected for a minute needs no full copy."""
    size = int(server.setting("repl-backlog-size") or _BACKLOG_BYTES)
    if server.number("connected_slaves") and size < _MIN_BACKLOG_BYTES:
        yield Finding(
            check="backlog",
            severity="warning",
            what=f"{server.where} has a repl-backlog-size of {size:,} bytes",
            why="a replica that was disconnected for some seconds needs a full copy, and is no safe target of a failover "
            "until then",
            mend=(f"{server.cli} CONFIG SET repl-backlog-size {_BACKLOG_BYTES}",),
        )


def check_nodes(server: Server) -> Iterator[Finding]:
    """The nodes of streams are small, so that single entries are read quickly."""
    for name, default in _NODE_LIMITS.items():
        limit = int(server.setting(name) or default)
        if limit == 0 or limit > 10 * default:
            yield Finding(
                check="nodes",
                severity="warning",
                what=f"{server.where} has {name} {limit or 'without a limit'}",
                why="Redis searches the whole node for each entry that is claimed, and trims only whole nodes",
                mend=(f"{server.cli} CONFIG SET {name} {default}",),
            )


def check_buffers(server: Server, *, largest_mean_entry_bytes: Callable[[], int]) -> Iterator[Finding]:
    """A reply fits into the buffer that Redis has for a client. `largest_mean_entry_bytes` is called only if it matters."""
    words = server.setting("client-output-buffer-limit").split()
    limits = {words[at]: int(words[at + 1]) for at in range(0, len(words), 4)}
    limit = limits.get("normal", 0)
    if not limit or limit >= _READ_BYTES:
        return
    largest = largest_mean_entry_bytes()
    yield Finding(
        check="buffers",
        severity="problem" if largest >= limit else "warning",
        what=f"{server.where} ends a client whose reply exceeds {limit:,} bytes; entries of one stream have {largest:,} on average",
        why=f"a worker reads up to {_READ_BYTES:,} bytes at once (--prefetch-mb), and a larger entry cannot be read",
        mend=(f"{server.cli} CONFIG SET client-output-buffer-limit 'normal 0 0 0'",),
    )


SERVER_CHECKS: Mapping[str, Callable[[Server], Iterable[Finding]]] = {
    "version": check_version,
    "role": check_role,
    "eviction": check_eviction,
    "persistence": check_persistence,
    "sync": check_sync,
    "truncated": check_truncated,
    "disk": check_disk,
    "replicas": check_replicas,
    "memory": check_memory,
    "timeout": check_timeout,
    "clients": check_clients,
    "backlog": check_backlog,
    "nodes": check_nodes,
}
"""The checks that need the server only."""


# --- Replies and commands ---


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _fields_of(read: Callable[[], Mapping[str, Mapping[str, str]]], address: str) -> Mapping[str, str]:
    found = read().get(address)
    if found is None:  # a failover has come between the two commands
        raise Unavailable(f"the primary {address} was replaced during the check")
    return found


def redis_cli(url: str, address: str) -> str:
    """The redis-cli command for a server of the deployment at `url`. It asks for the password."""
    if address.startswith("/"):
        place = f" -s {address}"
    else:
        host, _, port = address.rpartition(":")
        place = f" -h {host} -p {port}"
    credentials = url.partition("://")[2].rpartition("@")[0]
    user = credentials.partition(":")[0]
    login = (f" --user {user}" if user else "") + " --askpass" if credentials else ""
    return f"redis-cli{place}{' --tls' if url.startswith('rediss') else ''}{login}"
