"""Expectations of the app `canceling`: some messages fail, and each dead letter cancels the rest of its key."""

from collections import defaultdict
from pathlib import Path

from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.testing.history import Event, Report, check
from millstream.testing.invariants import check_invariants
from tests.support.keyed_workers import KeyedExpectations

FAILS = (3, 20)
"""The messages of a key that fail, by their number in the key: the second one is canceled before it can."""

_PUBLISH = """
local ids = {}
for n = 0, ARGV[2] - 1 do
  local deed = (n == tonumber(ARGV[3]) or n == tonumber(ARGV[4])) and 'fail' or ''
  ids[#ids + 1] = redis.call('XADD', KEYS[1], '*', 'key', ARGV[1], 'n', n, 'do', deed)
end
return ids
"""


class CancelingExpectations(KeyedExpectations):
    """Waves of messages of so many keys, `each` of a key, of which two are to fail."""

    def __init__(self, client: Client, folder: Path, *, keys: int, each: int) -> None:
        super().__init__(client, folder, app="canceling")
        self._names = [f"k{number}" for number in range(keys)]
        self._each = each
        self._waves: dict[str, list[list[str]]] = defaultdict(list)

    def publish_more(self) -> None:
        """See Expectations. Publish a wave."""
        for key in self._names:
            # In one step: no message of a key may be published after the dead letter of an earlier one.
            found = self.client.execute("EVAL", _PUBLISH, 1, "in", key, self._each, *FAILS)
            ids = [one.decode() for one in found]
            self.key_of |= dict.fromkeys(ids, key.encode())
            self.enqueued += ids
            self._waves[key].append(ids)

    def publish_later(self) -> list[str]:
        """Publish a message of each key that nothing cancels; return their ids."""
        return self.publish_keys(len(self._names), len(self._names))

    def is_canceling(self) -> bool:
        """Return whether messages of a key are canceled and have no dead letter yet, or might have."""
        return bool(self.client.execute("EXISTS", self.keys.canceled))

    def check_effects(self, later: list[str]) -> Report:
        """Check each key: outputs up to its first message that fails, then dead letters in order, without a run.

        `later`: messages that nothing cancels.
        """
        letters = self.dead_letters()
        outputs = self.outputs()
        effects = [
            Event(kind="committed", stream="in", id=row["id"], key=row["key"].encode(), handler="work", position=at)
            for at, row in enumerate(outputs)
        ]
        effects += [Event(kind="dead", stream="in", id=one.id, key=one.key, handler="work") for one in letters]
        enqueued = [Event(kind="enqueued", stream="in", id=one, key=self.key_of[one]) for one in self.enqueued]
        runs = self.runs()
        report = check([*enqueued, *runs, *effects], handlers={"in": ["work"]}, overlap=False)
        report.raise_if_bad()
        reasons = {one.id: one.reason for one in letters}
        ran = {event.id for event in runs}
        for waves in self._waves.values():
            for wave in waves:
                first = next(at for at, one in enumerate(wave) if one in reasons)
                assert first <= FAILS[0], "the message that fails is a dead letter"
                # One that became a dead letter since its workers died may have ended in them, and those behind it have
                # run.
                may_have_run = reasons[wave[first]] == "crashed"
                assert may_have_run or not ran & {*wave[first + 1 :]}, "a cancelled message was run"
                assert [reasons.get(one) for one in wave[first + 1 :]] == ["canceled"] * (self._each - first - 1)
        for key in self._waves:
            order = [EntryId.parse(one.id) for one in letters if one.key == key.encode()]
            assert order == sorted(order), "the dead letters of a key are in stream order"
        assert {row["id"] for row in outputs} >= set(later), "later messages run"
        assert check_invariants(self.client, self.keys, "in") == []
        return report
