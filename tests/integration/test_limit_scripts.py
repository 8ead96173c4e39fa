"""The scripts of a limit: which key queue gets a permit of a value, and when each of the others asks again.

A message takes seconds or more of the rate here, so no delay of a test changes what is due.
"""

from collections.abc import Iterable

import pytest

from millstream import Limit
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.permits import Permits
from millstream.handlers.limits import Share
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys

pytestmark = [pytest.mark.worker, pytest.mark.keys]

KEYS = HandlerKeys("app", "handle", "in")
TAKES_MS = 10_000.0
RATE = Limit(per="tenant", rate="6/m")


class Tenant:
    """Asks for permits of the value `a`, as a worker does."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._store = CommitStore(client, app="app", handler="handle", token=1)

    def take(self, queue: str, limit: Limit = RATE, takes_ms: float | None = TAKES_MS) -> float:
        """Ask for a key queue; return 0 or how long it waits."""
        permits = Permits(limit, 60_000)
        return permits.take(self._store, "in", queue.encode(), Share(b"a", takes_ms), b"1 w %s" % queue.encode())

    def now_ms(self) -> float:
        seconds, micros = self.client.execute("TIME")
        return int(seconds) * 1_000 + int(micros) / 1_000

    def ready_at(self, at_ms: float, takes_ms: float = TAKES_MS) -> None:
        """Let the rate have granted a message before, so that the next one may begin at `at_ms`."""
        self.client.execute("HSET", KEYS.free_at(b"a"), "at", at_ms, "takes", takes_ms)

    def wait(self, **due_ms: float) -> None:
        """Let key queues wait that may ask from such a time on."""
        for queue, due in due_ms.items():
            self.client.execute("ZADD", KEYS.limited(b"a"), int(due), queue)

    @property
    def free_at(self) -> float:
        return float(self.client.execute("HGET", KEYS.free_at(b"a"), "at"))

    def due(self, queues: Iterable[str]) -> list[float]:
        return [float(self.client.execute("ZSCORE", KEYS.limited(b"a"), queue)) for queue in queues]


@pytest.fixture
def tenant(client: Client) -> Tenant:
    return Tenant(client)


@pytest.mark.parametrize("late_ms", [0, 30, 2_000])
def test_a_key_that_waited_and_asks_late_loses_at_most_what_is_beyond_a_tenth_of_a_second(
    tenant: Tenant, late_ms: int
) -> None:
    at = tenant.now_ms() - late_ms
    tenant.ready_at(at)
    tenant.wait(kA=at)
    before = tenant.now_ms()
    assert tenant.take("kA") == 0
    after = tenant.now_ms()
    assert max(at, before - 100) - 1 <= tenant.free_at - TAKES_MS <= max(at, after - 100) + 1


def test_a_key_that_did_not_wait_catches_up_on_nothing(tenant: Tenant) -> None:
    before = tenant.now_ms()
    tenant.ready_at(before - 50)
    assert tenant.take("kA") == 0
    assert tenant.free_at - TAKES_MS >= before - 1


def test_keys_that_waited_and_are_refused_keep_their_places_before_all_that_wait(tenant: Tenant) -> None:
    now = tenant.now_ms()
    tenant.ready_at(now + TAKES_MS)
    tenant.client.execute("HSET", KEYS.free_at(b"a"), "tail", now + 50_000)
    tenant.wait(kA=now - 300, kB=now - 200, kC=now - 100, kD=now + 40_000)
    for queue in ("kA", "kB", "kC"):
        assert tenant.take(queue) > 0
    first = tenant.free_at
    assert [due - first for due in tenant.due(["kA", "kB", "kC"])] == pytest.approx([0, TAKES_MS, 2 * TAKES_MS], abs=1)


def test_a_key_waits_for_what_those_before_it_take_and_not_for_its_own_cost(tenant: Tenant) -> None:
    tenant.ready_at(tenant.now_ms() + TAKES_MS)
    for queue, takes_ms in {"kA": 1_000.0, "kB": 20_000.0, "kC": 1_000.0, "kD": 1_000.0}.items():
        assert tenant.take(queue, takes_ms=takes_ms) > 0
    first = tenant.free_at
    assert [due - first for due in tenant.due(["kA", "kB", "kC", "kD"])] == pytest.approx(
        [0, 1_000, 21_000, 22_000], abs=1
    )


def test_the_first_key_that_waits_waits_for_none_that_have_waited_before_it(tenant: Tenant) -> None:
    tenant.ready_at(tenant.now_ms() + TAKES_MS)
    for queue in ("kA", "kB"):
        assert tenant.take(queue) > 0
    tenant.client.execute("DEL", KEYS.limited(b"a"))
    assert tenant.take("kC") > 0
    assert tenant.due(["kC"])[0] - tenant.free_at < 1
