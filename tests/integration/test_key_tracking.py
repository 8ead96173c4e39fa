"""Key tracking without a thread: on real Redis."""

from typing import Any

import pytest

from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.key_tracking import KeyTracker
from millstream.redis_client.resp import Push, RespConnection
from millstream.redis_client.scripts import Script

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
