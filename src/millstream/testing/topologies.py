"""Topologies: Redis Cluster, Sentinel, TLS and ACL deployments of local processes, for tests.

Each is a context manager that yields once the deployment works, and stops all its processes at the end. They are for
tests only: loopback addresses, generated certificates and passwords, no tuning for performance.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from urllib.parse import quote

from millstream.clock import SYSTEM_CLOCK
from millstream.errors import ConfigError, ServerError
from millstream.redis_client.embedded_server import EmbeddedServer

PRIMARY_NAME = "mymaster"

_SLOTS = 16_384
_POLL_MS = 50

# A kill must lose no acknowledged write, and no machine fails in these tests (see EmbeddedServer).
_KILL_SAFE = {"appendfsync": "no"}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Redis Cluster of primaries only; `nodes` own equal shares of the slots, in order."""

    url: str
    nodes: Sequence[EmbeddedServer]


@dataclass(frozen=True, kw_only=True)
class SentinelTrio:
    """Three Sentinels over a primary and a replica, named by their roles at the start."""

    url: str
    primary: EmbeddedServer
    replica: EmbeddedServer
    sentinels: Sequence[EmbeddedServer]


@dataclass(frozen=True, kw_only=True)
class TlsServer:
    """A server that speaks TLS only; `ca_file` is the authority that signed its certificate."""

    url: str
    server: EmbeddedServer
    ca_file: Path


@dataclass(frozen=True, kw_only=True)
class AclServer:
    """A server for named users only; `urls` has each user's URL, with the password."""

    urls: Mapping[str, str]
    server: EmbeddedServer


@contextmanager
def cluster(nodes: int = 3) -> Iterator[Cluster]:
    """Start a Redis Cluster of `nodes` primaries (at least 3); yield once all of them report it complete.

    Raises `ConfigError` for fewer nodes, and `ServerError` if it is not complete within a minute.
    """
    if nodes < 3:
        raise ConfigError(f"a Redis Cluster needs 3 nodes or more, not {nodes}")
    directives = {
        "cluster-enabled": "yes",
        "cluster-node-timeout": "5000",
        **_KILL_SAFE,
    }
    with ExitStack() as stack:
        servers = [stack.enter_context(EmbeddedServer(extra=directives)) for _ in range(nodes)]
        for index, server in enumerate(servers):
            first, end = _SLOTS * index // nodes, _SLOTS * (index + 1) // nodes
            server.call("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            # With distinct epochs from the start, the nodes have no epoch collisions to resolve.
            server.call("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for server, other in combinations(servers, 2):
            # Every pair meets: discovery by gossip may take seconds.
            server.call("CLUSTER", "MEET", "127.0.0.1", other.port)

        def is_complete() -> bool:
            reports = [server.call("CLUSTER", "INFO") for server in servers]
            known = f"cluster_known_nodes:{nodes}\r\n".encode()
            return all(b"cluster_state:ok" in report and known in report for report in reports)

        wait_until(is_complete, "the cluster to become complete")
        yield Cluster(url=f"redis+cluster://127.0.0.1:{servers[0].port}", nodes=tuple(servers))


@contextmanager
def sentinel_trio(*, down_after_ms: int = 1_000) -> Iterator[SentinelTrio]:
    """Start a primary, its replica and three Sentinels; yield once a failover would work.

    The Sentinels take a primary for dead that has not answered for `down_after_ms` milliseconds, and replace it some
    seconds later. Raises `ServerError` if the five do not find each other within a minute.
    """
    with ExitStack() as stack:
        # By default a primary waits 5 s for more replicas before it synchronizes the first one.
        primary_directives = {"repl-diskless-sync-delay": "0", **_KILL_SAFE}
        primary = stack.enter_context(EmbeddedServer(extra=primary_directives))
        replica_directives = {
            "replicaof": f"127.0.0.1 {primary.port}",
            **primary_directives,
        }
        replica = stack.enter_context(EmbeddedServer(extra=replica_directives))
        sentinel_directives = {
            "sentinel monitor": f"{PRIMARY_NAME} 127.0.0.1 {primary.port} 2",
            "sentinel down-after-milliseconds": f"{PRIMARY_NAME} {down_after_ms}",
            "sentinel failover-timeout": f"{PRIMARY_NAME} 5000",
        }
        sentinels = [stack.enter_context(EmbeddedServer(extra=sentinel_directives)) for _ in range(3)]

        for sentinel, other in permutations(sentinels, 2):
            _introduce(sentinel, other, primary)

        def is_ready() -> bool:
            reports = [sentinel.call("INFO", "sentinel") for sentinel in sentinels]
            met = all(re.search(rb"status=ok,.*slaves=1,sentinels=3", report) for report in reports)
            return met and b"master_link_status:up" in replica.call("INFO", "replication")

        wait_until(is_ready, "the Sentinels, the primary and the replica to find each other")
        addresses = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        yield SentinelTrio(
            url=f"redis+sentinel://{addresses}/{PRIMARY_NAME}/0",
            primary=primary,
            replica=replica,
            sentinels=tuple(sentinels),
        )


def _introduce(sentinel: EmbeddedServer, other: EmbeddedServer, primary: EmbeddedServer) -> None:
    """Announce one Sentinel to another, as each does every 2 s (`sentinelProcessHelloMessage` of Redis)."""
    other_id = other.call("SENTINEL", "MYID").decode()
    hello = f"127.0.0.1,{other.port},{other_id},0,{PRIMARY_NAME},127.0.0.1,{primary.port},0"
    sentinel.call("PUBLISH", "__sentinel__:hello", hello)


@contextmanager
def tls_server() -> Iterator[TlsServer]:
    """Start a server with a certificate for 127.0.0.1 and localhost, signed by a generated authority.

    Clients need no certificate. Raises `ServerError` if the `openssl` command is missing or fails.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-tls-")))
        _make_certificates(folder)
        directives = {
            "tls-cert-file": f'"{folder / "server.crt"}"',
            "tls-key-file": f'"{folder / "server.key"}"',
            "tls-ca-cert-file": f'"{folder / "ca.crt"}"',
            "tls-auth-clients": "no",
            **_KILL_SAFE,
        }
        server = stack.enter_context(EmbeddedServer(extra=directives))
        ca_file = folder / "ca.crt"
        yield TlsServer(
            url=f"{server.url}?ssl_ca_certs={quote(str(ca_file))}",
            server=server,
            ca_file=ca_file,
        )


@contextmanager
def acl_server(rules: Sequence[str]) -> Iterator[AclServer]:
    """Start a server with only these users; the default user is off.

    * `rules`: one user each, as in redis.conf after the word `user`, with one password in clear text and without `on`:
      `"alice >secret ~flights* +@all"`

    Raises `ConfigError` for a rule without a name and a password.
    """
    users: dict[str, tuple[str, str]] = {}
    for rule in rules:
        match = re.fullmatch(r"(?P<name>\S+)\s+(?P<rest>(?:.*\s)?>(?P<password>\S+).*)", rule)
        if match is None:
            raise ConfigError(f"the ACL rule {rule!r} must start with a user's name and contain a `>password`")
        users[match["name"]] = (match["password"], match["rest"])
    directives = {f"user {name}": f"on {rest}" for name, (_, rest) in users.items()}
    with EmbeddedServer(extra={"user default": "off", **directives, **_KILL_SAFE}) as server:
        urls = {
            name: f"redis://{quote(name, safe='')}:{quote(password, safe='')}@127.0.0.1:{server.port}/0"
            for name, (password, _) in users.items()
        }
        yield AclServer(urls=urls, server=server)


def wait_until(condition: Callable[[], bool], what: str, *, timeout_ms: float = 60_000) -> None:
    """Return once `condition()` is true, polling every 50 ms.

    Raises `ServerError`, naming `what` it waited for, if the condition is not true within `timeout_ms`.
    """
    deadline_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_ms
    while not condition():
        if SYSTEM_CLOCK.monotonic_ms() >= deadline_ms:
            raise ServerError(f"timed out after {timeout_ms / 1000:g} s waiting for {what}: is the machine overloaded?")
        SYSTEM_CLOCK.sleep_ms(_POLL_MS)


_OPENSSL_CONF = """\
[req]
distinguished_name = name
[name]
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = IP:127.0.0.1, DNS:localhost
authorityKeyIdentifier = keyid
"""


def _make_certificates(folder: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ServerError("openssl is not on PATH: install it with `apt-get install openssl`")
    (folder / "openssl.cnf").write_text(_OPENSSL_CONF)
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    base = [openssl, "req", "-x509", "-config", "openssl.cnf", "-days", "2", *new_key]
    for name, signer in (("ca", []), ("server", ["-CA", "ca.crt", "-CAkey", "ca.key"])):
        subject = ["-subj", f"/CN=millstream test {name}", "-extensions", name]
        files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
        command = [*base, *subject, *files, *signer]
        completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if completed.returncode != 0:
            raise ServerError(f"openssl could not create a certificate (version 3.0 is needed): {completed.stderr}")
