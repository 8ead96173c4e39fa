"""The scripts of a limit: which key queue gets a permit of a value, and when each of the others asks again.

A message takes seconds or more of the rate here, so no delay of a test changes what is due.
"""

import itertools
import re
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
ONE, THOUSAND = (Limit(per="tenant", at_once=most) for most in (1, 1_000))


class Tenant:
    """Asks for permits of the value `a`, as a worker does."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._store = CommitStore(client, app="app", handler="handle", token=1)

    def take(
        self, queue: str, limit: Limit = RATE, takes_ms: float | None = TAKES_MS, *, hold_ms: float = 60_000
    ) -> float:
        """Ask for a key queue; return 0 or how long it waits."""
        permits = Permits(limit, hold_ms)
        return permits.take(self._store, "in", queue.encode(), Share(b"a", takes_ms), b"1 w %s" % queue.encode())

    def give_back(self, queue: str, limit: Limit) -> None:
        """Return the permit of a key queue."""
        Permits(limit, 60_000).give_back(self._store, "in", Share(b"a", None), b"1 w %s" % queue.encode())

    def hold(self, count: int) -> None:
        """Let so many other messages run."""
        ends = f"t{self.now_ms() + 3_600_000:.0f}"
        items = [part for n in range(count) for part in (f"2 w {n}-0", ends)]
        self.client.execute("HSET", KEYS.permits(b"a"), *items)

    def back_off(self, queue: str, due_ms: float) -> None:
        """Let a key queue with a message back off."""
        self.client.execute("RPUSH", KEYS.queue(queue.encode()), "1-0")
        self.client.execute("ZADD", KEYS.backoff, int(due_ms), queue)

    def now_ms(self) -> float:
        seconds, micros = self.client.execute("TIME")
        return int(seconds) * 1_000 + int(micros) / 1_000

    def ready_at(self, at_ms: float, takes_ms: float = TAKES_MS) -> None:
        """Let the rate have granted a message before, so that the next one may begin at `at_ms`."""
        self.client.execute("HSET", KEYS.free_at(b"a"), "at", at_ms, "takes", takes_ms)

    def wait(self, **due_ms: float) -> None:
        """Let key queues wait that may ask from such a time on."""
        self.client.pipeline([("ZADD", KEYS.limited(b"a"), int(due), queue) for queue, due in due_ms.items()])

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


def test_behind_more_than_a_minute_of_keys_each_asks_by_itself(tenant: Tenant) -> None:
    tenant.hold(1)
    now = tenant.now_ms()
    tenant.wait(**{f"k{n}": now + 1_000 + 10 * n for n in range(12_000)})
    last = tenant.due(["k11999"])[0]
    names = [f"kLate{n}" for n in range(5)]
    for name in names:
        assert tenant.take(name, ONE, None) > 0
    assert [due - last for due in tenant.due(names)] == [10, 20, 30, 40, 50]


def test_keys_that_a_slow_rate_lets_wait_for_more_than_a_minute_do_not_all_ask_after_it(tenant: Tenant) -> None:
    tenant.ready_at(tenant.now_ms() + TAKES_MS)
    names = [f"k{n}" for n in range(40)]
    for name in names * 2:
        assert tenant.take(name) > 0
    dues = sorted(tenant.due(names))
    assert min(later - earlier for earlier, later in itertools.pairwise(dues)) >= 10


def test_a_set_of_keys_that_wait_lasts_until_the_last_of_them_has_asked(tenant: Tenant) -> None:
    tenant.hold(1)
    now = tenant.now_ms()
    tenant.wait(**{f"k{n}": now + 1_000 + 100 * n for n in range(9_000)})
    tenant.client.execute("PEXPIRE", KEYS.limited(b"a"), 60_000)
    assert tenant.take("kLate", ONE, None) > 0
    assert tenant.take("k0", ONE, None) > 0
    lasts_until = tenant.now_ms() + tenant.client.execute("PTTL", KEYS.limited(b"a"))
    assert lasts_until > max(tenant.due(["kLate", "k0"]))


def test_a_returned_permit_wakes_no_key_that_does_not_wait_for_it_any_more(tenant: Tenant) -> None:
    client, now = tenant.client, tenant.now_ms()
    assert tenant.take("kRuns", ONE, None) == 0
    client.execute("HSET", KEYS.meta, "owner", "keyed")
    tenant.wait(kEmpty=now + 10_000, kParked=now + 20_000, kFailed=now + 30_000, kA=now + 40_000, kB=now + 50_000)
    client.execute("HSET", KEYS.parked, "kParked", f"{now:.0f} audit")
    client.execute("RPUSH", KEYS.queue(b"kParked"), "1-0")
    tenant.back_off("kFailed", now + 3_600_000)
    tenant.back_off("kA", now + 40_000)
    tenant.back_off("kB", now + 50_000)
    tenant.give_back("kRuns", ONE)
    assert client.execute("LRANGE", KEYS.ready, 0, -1) == [b"kA"]
    assert client.execute("ZRANGE", KEYS.backoff, 0, -1) == [b"kB", b"kFailed"]
    assert client.execute("ZRANGE", KEYS.limited(b"a"), 0, -1) == [b"kA", b"kB"]


def test_a_returned_permit_wakes_a_key_whose_refusal_is_under_way(tenant: Tenant) -> None:
    client, now = tenant.client, tenant.now_ms()
    assert tenant.take("kRuns", ONE, None) == 0
    client.execute("HSET", KEYS.meta, "owner", "keyed")
    client.execute("HSET", KEYS.owners, "kA", "1 w x")
    tenant.wait(kA=now + 3_600_000, kB=now + 3_600_001)
    tenant.give_back("kRuns", ONE)
    assert tenant.due(["kA"])[0] < now + 3_600_000
    assert tenant.due(["kB"])[0] >= now + 3_600_000


def test_a_permit_of_a_shorter_run_does_not_end_that_of_a_longer_one(tenant: Tenant) -> None:
    assert tenant.take("kLong", THOUSAND, None, hold_ms=7_200_000) == 0
    assert tenant.take("kShort", THOUSAND, None, hold_ms=60_000) == 0
    assert tenant.client.execute("PTTL", KEYS.permits(b"a")) > 3_600_000


def test_a_permit_that_is_asked_for_again_lasts_as_long_as_a_new_one(tenant: Tenant) -> None:
    permits = KEYS.permits(b"a")
    assert tenant.take("kA", ONE, None, hold_ms=7_200_000) == 0
    tenant.client.execute("PEXPIRE", permits, 60_000)
    assert tenant.take("kA", ONE, None, hold_ms=7_200_000) == 0
    assert tenant.client.execute("PTTL", permits) > 3_600_000
    assert tenant.client.execute("HLEN", permits) == 1


def calls(client: Client, command: str) -> int:
    """How often the server has executed a command, those of scripts included."""
    text = client.execute("INFO", "commandstats").decode()
    return next((int(one) for one in re.findall(rf"cmdstat_{command}:calls=(\d+)", text)), 0)


def test_a_thousand_permits_are_not_read_again_at_each_refusal(client: Client, tenant: Tenant) -> None:
    checked = KEYS.permits_checked(b"a")
    tenant.hold(1_000)
    before = calls(client, "set")
    assert tenant.take("k0", THOUSAND, None) > 0
    assert calls(client, "set") == before + 1, "it is noted that they were read"
    assert client.execute("PTTL", checked) in (-2, *range(1_001)), "for a second, which may be over"
    client.execute("SET", checked, 1, "PX", 3_600_000)
    before = calls(client, "hgetall")
    for n in range(50):
        assert tenant.take(f"k{n}", THOUSAND, None) > 0
    assert calls(client, "hgetall") == before
    client.execute("HSET", KEYS.permits(b"a"), "2 w 7-0", "t1")
    client.execute("DEL", checked)
    assert tenant.take("k0", THOUSAND, None) == 0
