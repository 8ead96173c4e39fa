"""The deployments that tests run against, and the pytest fixtures, each used as a user would."""

import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.sentinel import MasterNotFoundError, Sentinel

from millstream.errors import ConfigError, ServerError
from millstream.redis_client import embedded_server
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.topologies import PRIMARY_NAME, acl_server, cluster, tls_server
from tests.support.replicas import is_primary, kill_primary, steady_trio
from tests.support.servers import install_package
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.groups]


def test_a_cluster_spreads_keys_over_its_nodes_and_survives_a_restart_of_one() -> None:
    with cluster() as deployment:
        assert deployment.url == f"redis+cluster://127.0.0.1:{deployment.nodes[0].port}"
        plain_url = deployment.url.replace("redis+cluster", "redis")
        with redis.RedisCluster.from_url(plain_url) as client:
            for number in range(300):
                client.set(f"key-{number}", number)
            assert all(node.call("DBSIZE") > 50 for node in deployment.nodes)
            assert sum(node.call("DBSIZE") for node in deployment.nodes) == 300

        deployment.nodes[1].kill()
        deployment.nodes[1].start()
        eventually(lambda: is_whole(deployment.nodes), "the cluster to become whole again")
        with redis.RedisCluster.from_url(plain_url) as client:
            assert [client.get(f"key-{number}") for number in range(300)] == [
                str(number).encode() for number in range(300)
            ]


def is_whole(nodes: Sequence[EmbeddedServer]) -> bool:
    return all(b"cluster_state:ok" in node.call("CLUSTER", "INFO") for node in nodes)


def test_a_cluster_of_two_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 nodes or more, not 2"), cluster(nodes=2):
        pass


def test_sentinels_promote_the_replica_when_the_primary_is_killed_and_keep_the_data() -> None:
    with steady_trio() as trio:
        ports = [sentinel.port for sentinel in trio.sentinels]
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        assert trio.url == f"redis+sentinel://{addresses}/{PRIMARY_NAME}/0"
        guide: Any = Sentinel([("127.0.0.1", port) for port in ports])
        assert guide.discover_master(PRIMARY_NAME) == ("127.0.0.1", trio.primary.port)
        with guide.master_for(PRIMARY_NAME) as client:
            client.set("key", "value")
            assert client.wait(1, 0) == 1

            kill_primary(trio)
            eventually(lambda: is_primary(trio.replica), "the failover")
            eventually(lambda: knows_primary(guide, trio.replica.port), "the Sentinels to tell of it")
            assert client.get("key") == b"value"


def test_a_replica_that_has_just_begun_to_replicate_ends_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_server, "_STOP_MS", 1_000 * FAIL_SAFE_S)  # it may get no processor for long
    with EmbeddedServer(extra={"repl-diskless-sync-delay": "0"}) as primary:
        replica = EmbeddedServer(extra={"replicaof": f"127.0.0.1 {primary.port}"})
        replica.start()
        eventually(lambda: b"master_link_status:up" in replica.call("INFO", "replication"), "the link")
        process = replica._process
        assert process is not None
        replica.stop()  # while it writes its first append-only file, it refuses to
        assert process.returncode == 0, "it was not killed"


def knows_primary(guide: Any, port: int) -> bool:
    try:
        return bool(guide.discover_master(PRIMARY_NAME) == ("127.0.0.1", port))
    except MasterNotFoundError:
        return False


@pytest.mark.usefixtures("tls")
def test_a_tls_server_speaks_tls_only_and_to_clients_that_trust_its_authority() -> None:
    with tls_server() as deployment:
        assert deployment.url.startswith(f"rediss://127.0.0.1:{deployment.server.port}/0?ssl_ca_certs=/")
        with redis.Redis.from_url(deployment.url) as client:
            client.set("key", "value")
            deployment.server.restart()
            assert client.get("key") == b"value"

        plain_url = deployment.url.replace("rediss", "redis").partition("?")[0]
        with redis.Redis.from_url(plain_url) as client, pytest.raises(redis.ConnectionError):
            client.ping()
        with (
            redis.Redis.from_url(deployment.url.partition("?")[0]) as client,
            pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            client.ping()
    assert not deployment.ca_file.exists()


@pytest.mark.usefixtures("tls")
def test_the_certificate_satisfies_the_strictest_checks_of_python() -> None:
    with tls_server() as deployment:
        context = ssl.create_default_context(cafile=deployment.ca_file)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        for host in ("127.0.0.1", "localhost"):
            address = ("127.0.0.1", deployment.server.port)
            with (
                socket.create_connection(address) as plain,
                context.wrap_socket(plain, server_hostname=host) as tls,
            ):
                tls.sendall(b"PING\r\n")
                assert tls.recv(100) == b"+PONG\r\n"


def test_the_error_of_a_missing_openssl_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="apt-get install openssl"), tls_server():
        pass


def test_an_acl_server_admits_its_users_only_and_limits_them_to_their_rules() -> None:
    rules = ["reader >s/e:c@ret ~flights* +@read +xadd", "boss ~* &* +@all >p"]
    with acl_server(rules) as deployment:
        with redis.Redis.from_url(deployment.urls["boss"]) as boss:
            boss.set("other", "value")
            assert boss.acl_whoami() == "boss"
        with redis.Redis.from_url(deployment.urls["reader"]) as reader:
            reader.xadd("flights", {"tailnum": "N14228"})
            assert reader.xlen("flights") == 1
            with pytest.raises(redis.exceptions.NoPermissionError):
                reader.get("other")
        with pytest.raises(ServerError, match="NOAUTH"):
            deployment.server.call("PING")


@pytest.mark.parametrize("rule", ["alice", "alice on nopass", ">secret"])
def test_an_acl_rule_without_a_name_or_a_password_is_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match="must start with a user's name"), acl_server([rule]):
        pass


# --- the pytest plugin ---

ALONE = tuple(f"-pno:{name}" for name in ("hypothesispytest", "xdist", "xdist.looponfail", "anyio", "valkey"))
"""Plugins that users need not have, and that take longer to be loaded than all the rest."""

USERS_TEST = """
import os
import redis

PIDS = set()

def test_one(millstream_url, millstream_server):
    PIDS.add(millstream_server.pid)
    with redis.Redis.from_url(millstream_url) as client:
        assert client.dbsize() == 0
        client.set("left", "over")

def test_two_sees_nothing_of_one(millstream_url, millstream_server):
    PIDS.add(millstream_server.pid)
    assert len(PIDS) == 1
    with redis.Redis.from_url(millstream_url) as client:
        assert client.dbsize() == 0

def test_three_may_kill_its_own(millstream_fresh_server, millstream_server):
    assert millstream_fresh_server.pid != millstream_server.pid
    with redis.Redis.from_url(millstream_fresh_server.url) as client:
        client.set("key", "value")
        millstream_fresh_server.kill()
        millstream_fresh_server.start()
        assert client.get("key") == b"value"
"""


def test_the_fixtures_serve_the_tests_of_a_user(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(USERS_TEST)
    pytester.runpytest_subprocess("-W", "error", *ALONE).assert_outcomes(passed=3)


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 3}), ("true", {"errors": 3})])
def test_tests_of_a_user_are_skipped_without_redis_server_but_fail_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: dict[str, int]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", str(pytester.path))
    install_package(pytester.path / "hidden", None)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path / "hidden"), prepend=os.pathsep)
    pytester.makepyfile(USERS_TEST)
    result = pytester.runpytest_subprocess("-rs", *ALONE)
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines(["*apt-get install redis-server*"])


def test_the_plugin_costs_other_test_runs_no_imports(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys

        def test_nothing_heavy_is_loaded():
            assert "millstream.testing.plugin" in sys.modules
            assert not {"millstream.redis_client.embedded_server", "redis", "hiredis", "pyspark"} & set(sys.modules)
    """)
    pytester.runpytest_subprocess(*ALONE).assert_outcomes(passed=1)
