"""Expectations of a handler with a key: the published messages, their order in each key, and the state of each key."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from millstream import Limit
from millstream.delivery.state_expiry import live_states
from millstream.handlers.upcasting import parse_version_and_state
from millstream.redis_client.client import Client
from millstream.testing.history import Event, Report, check
from millstream.testing.invariants import check_invariants
from tests.support.waiting import eventually
from tests.support.worker_processes import Expectations


class KeyedExpectations(Expectations):
    """Expectations of the app `keyed`, or of another app whose handler counts the messages of each key."""

    def __init__(self, client: Client, folder: Path, *, app: str = "keyed") -> None:
        super().__init__(client, folder, app=app)
        self.key_of: dict[str, bytes] = {}

    def publish_keys(self, count: int, keys: int, **fields: str | int) -> list[str]:
        """Add messages of so many keys, round robin; return their ids."""
        items = [part for pair in fields.items() for part in pair]
        ids = self._publish(count, lambda n: ["key", f"k{n * 7919 % keys}", *items])
        self.key_of |= {one: f"k{n * 7919 % keys}".encode() for n, one in enumerate(ids)}
        return ids

    def publish_more(self) -> None:
        """See Expectations."""
        self.publish_keys(20, 20)

    def publish_key(self, key: str, count: int, **fields: str | int) -> list[str]:
        """Add messages of one key; return their ids."""
        ids = self.publish(count, key=key, **fields)
        self.key_of |= dict.fromkeys(ids, key.encode())
        return ids

    def is_done_on_spark(self) -> bool:
        """Return whether all batches have ended, and no key is deferred."""
        entries = self._ask("XREVRANGE", "in", "+", "-", "COUNT", 1)
        is_committed = bool(entries) and self._ask("HGET", self.keys.meta, "committed_id") == entries[0][0]
        return is_committed and not self._ask("EXISTS", self.keys.ready, self.keys.backoff)

    def check_keys(
        self,
        *,
        dead: Mapping[str, str] | None = None,
        more: Sequence[Event] = (),
        limits: Mapping[str, Limit] | None = None,
        overlap: bool = True,
        log: Callable[[], str] = str,
    ) -> Report:
        """Wait for the drain, then check the history: each message has one effect, in the order of its key.

        `more`: further events. `overlap`: no two runs of one key may have overlapped.
        """
        eventually(self.drained, "the drain", log=lambda: self._progress() + log())
        enqueued = [Event(kind="enqueued", stream="in", id=one, key=self.key_of[one]) for one in self.enqueued]
        outputs = self.outputs()
        effects = [
            Event(kind="committed", stream="in", id=row["id"], key=row["key"].encode(), handler="work", position=at)
            for at, row in enumerate(outputs)
        ]
        effects += [
            Event(kind="dead", stream="in", id=one.id, key=one.key, handler="work") for one in self.dead_letters()
        ]
        events = [*enqueued, *self.runs(), *effects, *more]
        report = check(events, handlers={"in": ["work"]}, overlap=overlap, limits=limits)
        report.raise_if_bad()
        assert {letter.id: letter.reason for letter in self.dead_letters()} == (dead or {})
        self.check_states(outputs)
        assert check_invariants(self.client, self.keys, "in") == []
        left = set(self._ask("KEYS", f"{self.keys.base}:*"))
        lasting = {name.encode() for name in self.lasting_keys()}
        assert left <= lasting | {key for key in left if key.endswith(b":last")}, left
        return report

    def stored_state(self, key: str) -> tuple[int, Mapping[str, Any]]:
        """Return the version and the values of the state that is stored for a key and has not expired."""
        (state,) = live_states(self.client, self.keys.state, [self._ask("HGET", self.keys.state, key)])
        assert state is not None
        return parse_version_and_state(state)

    def lasting_keys(self) -> Sequence[str]:
        """Return the keys of the handler that may stay when nothing is left to do."""
        return (self.keys.meta, self.keys.state, self.keys.dead_letters, self.keys.router)

    def check_states(self, outputs: Sequence[Mapping[str, str]]) -> None:
        """Check that each message ran on the state that the one before it in its key had left."""
        counts: dict[str, int] = defaultdict(int)
        for row in outputs:
            counts[row["key"]] += 1
            assert int(row["count"]) == counts[row["key"]], f"the state of {row['key']} skipped or repeated: {row}"
