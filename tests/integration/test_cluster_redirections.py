"""What a client does with the redirections of a cluster whose slots move."""

from collections import Counter
from collections.abc import Iterator

import pytest

from millstream.errors import MillstreamError
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.topologies import Cluster, cluster
from tests.support.command_stats import commands_run
from tests.support.slots import finish_move, move_slot
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli, pytest.mark.groups, pytest.mark.xdist_group("cluster_redirections")]

KEYS = [f"{{x}}{number}" for number in range(300)]
OTHERS = [f"k{number}" for number in range(30)]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture
def client(deployment: Cluster) -> Iterator[Client]:
    with Client(deployment.url) as made:
        for node in deployment.nodes:
            node.call("FLUSHALL")
        made.pipeline([("SET", key, key) for key in KEYS + OTHERS])
        yield made


def slot_and_nodes(deployment: Cluster, key: str) -> tuple[int, EmbeddedServer, EmbeddedServer]:
    """Return the slot of a key, the node that has it, and another one."""
    slot = deployment.nodes[0].call("CLUSTER", "KEYSLOT", key)
    source = next(node for node in deployment.nodes if node.call("CLUSTER", "COUNTKEYSINSLOT", slot))
    return slot, source, next(node for node in deployment.nodes if node is not source)


def counted(deployment: Cluster) -> Counter[str]:
    return sum((commands_run(node.call) for node in deployment.nodes), Counter[str]())


def test_all_commands_of_a_moved_slot_are_sent_again_after_one_look_at_the_slots(
    deployment: Cluster, client: Client
) -> None:
    slot, source, target = slot_and_nodes(deployment, KEYS[0])
    move_slot(source, target, slot, finish=True)
    before = counted(deployment)
    keys = [key for pair in zip(KEYS, OTHERS * 10, strict=True) for key in pair]
    commands = [command for key in keys for command in (("APPEND", key, "!"), ("GET", key))]
    replies = client.pipeline(commands)
    times = Counter[str]()
    for (_, key, *_), reply in zip(commands[1::2], replies[1::2], strict=True):
        times[key] += 1
        assert reply == (key + "!" * times[key]).encode()
    assert (counted(deployment) - before)["cluster|slots"] == 1


def test_keys_of_a_slot_on_its_way_are_read_at_both_nodes(deployment: Cluster, client: Client) -> None:
    slot, source, target = slot_and_nodes(deployment, KEYS[0])
    move_slot(source, target, slot, finish=False)
    client.execute("SET", KEYS[0], "new")
    assert client.pipeline([("GET", key) for key in KEYS]) == [b"new", *(key.encode() for key in KEYS[1:])]
    finish_move(source, target, slot)
    assert client.pipeline([("GET", key) for key in KEYS]) == [b"new", *(key.encode() for key in KEYS[1:])]


def test_an_unreadable_slot_map_behind_a_redirection_to_an_unknown_node_is_an_error_of_ours(
    deployment: Cluster, client: Client
) -> None:
    slot, source, _ = slot_and_nodes(deployment, KEYS[0])
    for node in deployment.nodes:
        node.call("ACL", "SETUSER", "clerk", "reset", "on", ">pw", "~*", "+@all")
    with (
        EmbeddedServer(extra={"cluster-enabled": "yes"}) as new,
        Client(deployment.url.replace("://", "://clerk:pw@")) as clerk,
    ):
        assert clerk.execute("GET", KEYS[0]) == KEYS[0].encode()
        theirs = new.call("CLUSTER", "MYID").decode()
        new.call("CLUSTER", "MEET", "127.0.0.1", source.port)
        eventually(lambda: theirs in source.call("CLUSTER", "NODES").decode(), "the node to be known")
        eventually(lambda: b"handshake" not in source.call("CLUSTER", "NODES"), "the node to be met")
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", theirs)
        for node in deployment.nodes:
            node.call("ACL", "SETUSER", "clerk", "-cluster")
        try:
            for ask in (lambda: clerk.execute("GET", "{x}"), lambda: clerk.pipeline([("GET", "{x}"), ("GET", "{x}y")])):
                with pytest.raises(MillstreamError):
                    ask()
        finally:
            source.call("CLUSTER", "SETSLOT", slot, "STABLE")
