"""Moving hash slots between the nodes of a cluster, step by step."""

from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.waiting import FAIL_SAFE_S


def move_slot(source: EmbeddedServer, target: EmbeddedServer, slot: int, *, finish: bool) -> None:
    """Move a slot and its keys to another node, as `redis-cli --cluster reshard` does; `finish`: tell both nodes."""
    ours, theirs = (node.call("CLUSTER", "MYID").decode() for node in (source, target))
    target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", ours)
    source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", theirs)
    while keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, 100):
        command = ("MIGRATE", "127.0.0.1", target.port, "", 0, round(FAIL_SAFE_S * 1_000), "KEYS", *keys)
        source.call(*command, timeout_ms=FAIL_SAFE_S * 1_000)
    if finish:
        finish_move(source, target, slot)


def finish_move(source: EmbeddedServer, target: EmbeddedServer, slot: int) -> None:
    """The slot is the target's now."""
    theirs = target.call("CLUSTER", "MYID").decode()
    for node in (target, source):
        node.call("CLUSTER", "SETSLOT", slot, "NODE", theirs)
