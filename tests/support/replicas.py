"""Replicas in tests: servers that are followed at once, and which of them were asked for ranges of streams."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from millstream.errors import ServerError
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.topologies import PRIMARY_NAME, SentinelTrio, sentinel_trio
from tests.support.command_stats import commands_run

FOLLOWS = {"repl-diskless-sync-delay": "0", "appendonly": "no"}


def is_primary(server: EmbeddedServer) -> bool:
    """Whether a replica was promoted. Sentinel has it close all connections then, perhaps the one that asks."""
    with suppress(ServerError):
        return b"role:master" in server.call("INFO", "replication")
    return False


@contextmanager
def steady_trio() -> Iterator[SentinelTrio]:
    """A trio whose Sentinels replace no primary before `kill_primary`, however long it gets no processor."""
    with sentinel_trio(down_after_ms=3_600_000) as trio:
        yield trio


def kill_primary(trio: SentinelTrio) -> None:
    """Kill the primary, and let the Sentinels replace it once it has been silent for a second."""
    trio.primary.kill()
    for sentinel in trio.sentinels:
        sentinel.call("SENTINEL", "SET", PRIMARY_NAME, "down-after-milliseconds", 1_000)


def asked(server: EmbeddedServer) -> int:
    """How many XRANGE a server has run."""
    return commands_run(server.call)["xrange"]


def has_all(replica: EmbeddedServer, primary: EmbeddedServer) -> bool:
    """Whether a replica has applied all that its primary has written so far."""
    written = _offset(primary, b"master_repl_offset")
    return _offset(replica, b"slave_repl_offset") >= written


def _offset(server: EmbeddedServer, field: bytes) -> int:
    _, _, rest = server.call("INFO", "replication").partition(field + b":")
    return int(rest.partition(b"\r")[0])


@contextmanager
def none_asked(*servers: EmbeddedServer) -> Iterator[None]:
    """None of them is asked for a range meanwhile."""
    before = [asked(server) for server in servers]
    yield
    assert [asked(server) for server in servers] == before


@contextmanager
def asked_for(*servers: EmbeddedServer) -> Iterator[None]:
    """Each of them is asked for a range meanwhile."""
    before = [asked(server) for server in servers]
    yield
    assert all(now > then for now, then in zip(map(asked, servers), before, strict=True))
