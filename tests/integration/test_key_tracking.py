"""Key tracking without a thread: on real Redis."""

import threading
from typing import Any

import pytest

from millstream.errors import Unavailable
from millstream.redis_client import key_tracking
from millstream.redis_client.client import Client
from millstream.redis_client.key_tracking import KeyTracker
from millstream.redis_client.resp import Push, RespConnection, slot_of, slot_owners
from millstream.redis_client.scripts import Script
from millstream.testing.topologies import Cluster, cluster
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.router]

KEYS = [f"k{n}" for n in range(5)]


def test_a_flushall_right_after_the_last_reply_is_tracked(millstream_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RespConnection.wait_and_receive
    name = real.__name__

    def received(line: RespConnection, timeout_ms: float) -> list[Any]:
        monkeypatch.setattr(RespConnection, name, real)
        found = real(line, timeout_ms)
        while len(found) < len(KEYS):
            found += real(line, timeout_ms)
        admin.execute("FLUSHALL")
        while not any(type(reply) is Push for reply in found):
            found += real(line, timeout_ms)
        return found

    with Client(millstream_url) as admin, Client(millstream_url) as client:
        watch = KeyTracker(client)
        assert watch.changed() is None
        monkeypatch.setattr(RespConnection, name, received)
        with pytest.raises(Unavailable):
            dict(watch.read_each(("EXISTS",), KEYS))
        assert watch.wait(0), "there is something to be told"
        assert watch.changed() is None, "nothing is known any more"
        dict(watch.read_each(("EXISTS",), KEYS))
        for key in KEYS:
            admin.execute("SET", key, "1")
        assert watch.changed() == set(KEYS)
        watch.close()


def test_a_script_that_the_server_lacks_is_sent_with_its_text_and_its_keys_are_tracked(client: Client) -> None:
    script = Script("commit/read_range")
    watch = KeyTracker(client)
    watch.changed()
    for key in KEYS:
        client.execute("XADD", key, "1-1", "a", "1")
    client.execute("SCRIPT", "FLUSH")
    commands = {key: script.command((key,), ("0-0", 10, 1_000, 1)) for key in KEYS}
    assert {key: reply[1][0][0] for key, reply in watch.read(commands)} == dict.fromkeys(KEYS, b"1-1")
    assert watch.changed() == set()
    client.execute("XADD", KEYS[2], "2-1", "a", "1")
    assert watch.changed() == {KEYS[2]}
    watch.close()


def test_a_wait_gives_keys_that_could_not_be_tracked_a_little_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = KeyTracker(client)
    watch.changed()
    with monkeypatch.context() as patch:
        patch.setattr(key_tracking, "_read_over", lambda _, commands: [(key, Unavailable("moved")) for key in commands])
        dict(watch.read_each(("EXISTS",), KEYS[:1]))
    dict(watch.read_each(("EXISTS",), KEYS[1:]))
    with Client(client.url) as other, monkeypatch.context() as patch:
        patch.setattr(key_tracking, "_UNTRACKED_MS", FAIL_SAFE_S * 1_000)
        change = threading.Timer(0.2, lambda: other.execute("SET", KEYS[1], "1"))
        change.start()
        assert watch.wait(FAIL_SAFE_S * 1_000)
        assert watch.changed() == set(KEYS[:2]), "it has waited for the change"
        change.join()
    with monkeypatch.context() as patch:
        patch.setattr(key_tracking, "_read_over", lambda _, commands: [(key, Unavailable("moved")) for key in commands])
        dict(watch.read_each(("EXISTS",), KEYS[:1]))
    assert watch.wait(FAIL_SAFE_S * 1_000), "without a change, too"
    assert watch.changed() == set(KEYS[:1])
    watch.close()


def leave_unowned(deployment: Cluster, slot: int) -> None:
    """Take a slot from its node, so that the cluster goes on without it."""

    def is_unowned() -> bool:
        found = [(node, slot_owners(node.call("CLUSTER", "SLOTS"))[slot]) for node in deployment.nodes]
        for node, owner in found:
            if owner is not None:
                node.call("CLUSTER", "DELSLOTS", slot)
        return all(owner is None for _, owner in found)

    for node in deployment.nodes:
        node.call("CONFIG", "SET", "cluster-require-full-coverage", "no")
    eventually(is_unowned, "a slot without an owner")


def test_keys_of_a_primary_that_is_down_and_of_a_slot_without_an_owner_hide_no_others() -> None:
    with cluster() as deployment:
        leave_unowned(deployment, slot_of(b"unowned"))
        first, *others = deployment.nodes
        places = ",".join(f"127.0.0.1:{node.port}" for node in deployment.nodes)
        with Client(f"redis+cluster://{places}") as client:
            owners = {key: client.shard(key).primary for key in map(str, range(100))}
            by_port = {owner[1]: key for key, owner in owners.items() if owner is not None}
            lost, *kept = (by_port[node.port] for node in deployment.nodes)
            keys = [lost, *kept, "unowned"]
            tracker = KeyTracker(client)
            tracker.changed()

            def read() -> dict[str, Any]:
                return dict(tracker.read_each(("EXISTS",), keys))

            assert [key for key, reply in read().items() if isinstance(reply, Unavailable)] == ["unowned"]
            assert tracker.changed() == set(), "a key that was not read does not count as changed"
            first.kill()
            assert tracker.changed() is None
            found = read()
            assert {key for key, reply in found.items() if isinstance(reply, Unavailable)} == {lost, "unowned"}
            assert [found[key] for key in kept] == [0, 0]
            others[0].call("SET", kept[0], "1")
            assert tracker.changed() == {kept[0]}
            first.start()
            first.call("CONFIG", "SET", "cluster-require-full-coverage", "no")

            def is_tracked() -> bool:
                tracker.changed()
                return read()[lost] == 0 and tracker.changed() == set()

            eventually(is_tracked, "the keys of the primary to be tracked again")
            first.call("SET", lost, "1")
            assert tracker.changed() == {lost}
            tracker.close()
