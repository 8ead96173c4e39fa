"""Expectations of apps that limit the messages of each tenant, while what runs them is killed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from millstream import Limit
from millstream.testing.history import Event, Report, check, read_events
from tests.support.apps.worker_app import PACE
from tests.support.keyed_workers import KeyedExpectations
from tests.support.processes import lives

KEYS, TENANTS, AT_ONCE = 24, 3, 2


class LimitedExpectations(KeyedExpectations):
    """Expectations of the app `tenants`: those of any keyed handler, and that its limit was never exceeded."""

    def publish_more(self) -> None:
        """See Expectations."""
        self.publish_tenants(2 * KEYS, lambda n: ["ms", 1 + n % 7 * 3])

    def publish_tenants(self, count: int, items_of: Callable[[int], list[str | int]]) -> None:
        """Add messages of all keys, round robin, each of which is of one tenant."""
        ids = self._publish(count, lambda n: ["key", f"k{n % KEYS}", "tenant", f"t{n % TENANTS}", *items_of(n)])
        self.key_of |= {one: f"k{n % KEYS}".encode() for n, one in enumerate(ids)}

    def permits(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Each permit: the key that has it, its holder, and when it ends."""
        for key in self._ask("KEYS", f"{self.keys.base}:permits:*"):
            for holder, ends in zip(*[iter(self._ask("HGETALL", key))] * 2, strict=True):
                yield key, holder, ends

    def check_at_once(self, alive_ms: Mapping[str, float], log: Callable[[], str]) -> Report:
        """Check all that the handler promises. `alive_ms`: process -> when it was still alive."""
        limits = {"work": Limit(at_once=AT_ONCE)}
        report = self.check_keys(overlap=False, more=self._ends_of_killed(alive_ms), limits=limits, log=log)
        assert {event.limited for event in self.runs() if event.kind == "started"} == {
            f"t{n}" for n in range(TENANTS)
        }, "each run counts for its tenant"
        return report

    def _ends_of_killed(self, alive_ms: Mapping[str, float]) -> list[Event]:
        """The ends of the runs that were killed: they lasted until then, or longer."""
        running: dict[tuple[str, str], Event] = {}
        for event in sorted(self.runs(), key=lambda one: one.at or 0.0):
            if event.kind == "started":
                running[event.id, event.worker] = event
            else:
                running.pop((event.id, event.worker))
        ends = [(event, alive_ms.get(event.worker)) for event in running.values()]
        return [replace(event, kind="ended", at=max(event.at or 0.0, at)) for event, at in ends if at is not None]


class PacedExpectations(LimitedExpectations):
    """Expectations of the app `paced`, which limits the rate of each tenant."""

    def publish_more(self) -> None:
        """See Expectations."""
        self.publish_tenants(KEYS, lambda n: ["cost", 1 + n % 3])

    def drained(self) -> bool:
        """Return whether nothing is left to do, and the rate lets each tenant begin."""
        return super().drained() and not self._ask("KEYS", f"{self.keys.base}:free-at:*")

    def check_rate(self) -> int:
        """Check the rate of each tenant by the permits; return their number."""
        permits = list(read_events(*self._folder.glob("permits.*")))
        assert {event.limited for event in permits} == {f"t{n}" for n in range(TENANTS)}
        check(permits, limits={"work": PACE}).raise_if_bad()
        return len(permits)


class PacedTaskExpectations(PacedExpectations):
    """Expectations of the app `paced` on Spark."""

    def drained(self) -> bool:
        """Return whether all batches have ended, no key waits, and the rate lets each tenant begin."""
        return self.is_done_on_spark() and not self._ask("KEYS", f"{self.keys.base}:free-at:*")


class TaskExpectations(LimitedExpectations):
    """Expectations of the app `tenants` on Spark, whose permits have the number of their process."""

    def end_permits(self) -> None:
        """Remove the permits of processes that have ended, as their expiry would, a minute after the time limit."""
        for key, holder, _ in self.permits():
            if not lives(int(holder.partition(b"-")[0])):
                self._ask("HDEL", key.decode(), holder.decode())

    def lasting_keys(self) -> Sequence[str]:
        """See KeyedExpectations. A permit that is returned notifies idle workers, of which there are none."""
        return (*super().lasting_keys(), self.keys.notify)

    def drained(self) -> bool:
        """Return whether all batches have ended, and no key waits; end the permits of the dead for that."""
        self.end_permits()
        return self.is_done_on_spark()
