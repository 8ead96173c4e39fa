"""Key tracking without a thread: on real Redis."""

from typing import Any

import pytest

from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.key_tracking import KeyTracker, _TrackedConnection
from millstream.redis_client.resp import Push

pytestmark = [pytest.mark.router]

KEYS = [f"k{n}" for n in range(5)]


def test_a_flushall_right_after_the_last_reply_is_tracked(millstream_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _TrackedConnection._received
    name = real.__name__

    def received(line: _TrackedConnection) -> list[Any]:
        monkeypatch.setattr(_TrackedConnection, name, real)
        found = real(line)
        while len(found) < len(KEYS):
            found += real(line)
        admin.execute("FLUSHALL")
        while not any(type(reply) is Push for reply in found):
            found += real(line)
        return found

    with Client(millstream_url) as admin, Client(millstream_url) as client:
        watch = KeyTracker(client)
        assert watch.changed() is None
        monkeypatch.setattr(_TrackedConnection, name, received)
        with pytest.raises(Unavailable):
            dict(watch.read_each(("EXISTS",), KEYS))
        assert watch.wait(0), "there is something to be told"
        assert watch.changed() is None, "nothing is known any more"
        dict(watch.read_each(("EXISTS",), KEYS))
        for key in KEYS:
            admin.execute("SET", key, "1")
        assert watch.changed() == set(KEYS)
        watch.close()
