"""Key tracking without a thread: on real Redis."""

from typing import Any

import pytest

from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.key_tracking import KeyTracker
from millstream.redis_client.resp import Push, RespConnection

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
