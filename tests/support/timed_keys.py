"""Expectations of the app `timed`, whose messages set, replace and cancel timers of their key."""

from collections import Counter
from typing import NamedTuple

from millstream.delivery import DelayedMessages
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD
from tests.support.fields import text_fields
from tests.support.keyed_workers import KeyedExpectations

KEYS = 8
TURNS = 4
"""How many messages of a key have different timers: see `work_timed`."""

# In one step: a commit sets timers, and a timer adds messages.
_LOOK = """
local function fact(facts, name)
  for i = 1, #facts, 2 do
    if facts[i] == name then return facts[i + 1] end
  end
end
local delivered, pending = '', 0
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  if fact(group, 'name') == ARGV[1] then delivered, pending = fact(group, 'last-delivered-id'), fact(group, 'pending') end
end
local last = fact(redis.call('XINFO', 'STREAM', KEYS[1]), 'last-generated-id')
return {redis.call('ZCARD', KEYS[2]), pending, last, delivered, redis.call('HGET', KEYS[3], 'committed_id') or ''}
"""


class Look(NamedTuple):
    """What is left to do: timers, pending messages, the last id of the stream, of what was read and of all batches."""

    timers: int
    pending: int
    last: bytes
    delivered: bytes
    committed: bytes


class TimedExpectations(KeyedExpectations):
    """Expectations of the app `timed`: those of any keyed handler, also of the messages that timers have added."""

    def publish_more(self) -> None:
        """See Expectations."""
        self.publish_keys(3 * TURNS * KEYS, KEYS, ms=1)

    def publish_last(self) -> None:
        """Add a message of each key, which cancels the last timer that has to be canceled."""
        self.publish_keys(KEYS, KEYS)

    def drained(self) -> bool:
        """Return whether no timer is left, and nothing is pending or left to read."""
        found = self.look()
        return not found.timers and not found.pending and found.delivered == found.last

    def look(self) -> Look:
        """Look at all that may be left to do, at one moment."""
        keys = ("in", "millstream:{in}:in:due", self.keys.meta)
        return Look(*self._ask("EVAL", _LOOK, len(keys), *keys, self.keys.group))

    def add_timers(self) -> Counter[str]:
        """Expect the messages that timers have added; return what set them."""
        found: Counter[str] = Counter()
        for entry_id, pairs in self.client.execute("XRANGE", "in", "-", "+"):
            if pairs[0] == REDRIVE_FIELD:
                fields = text_fields(pairs)
                self.enqueued.append(entry_id.decode())
                self.key_of[entry_id.decode()] = fields["key"].encode()
                found[fields["of"]] += 1
        return found

    def check_timers(self, added: Counter[str]) -> int:
        """Check that each timer that must come has added one message, not before its time, and no other timer any.

        `added`: the result of `add_timers`. Return how many timers had to come.
        """
        due = due_times(self.client)
        assert added == Counter(dict.fromkeys(due, 1)), "each timer comes once, and none that was replaced or canceled"
        early = [row["of"] for row in self.outputs() if "of" in row and EntryId.parse(row["id"]).ms < due[row["of"]]]
        assert early == []
        assert DelayedMessages(self.client).count("in") == 0
        assert self.client.execute("EXISTS", "millstream:{in}:in:delayed") == 0
        return len(due)


def due_times(client: Client) -> dict[str, int]:
    """Return when each timer that must come is due, by the message that set it: its output has the time of the commit."""
    found: dict[str, int] = {}
    for entry_id, pairs in client.execute("XRANGE", "out", "-", "+"):
        row = text_fields(pairs)
        if "delay_ms" in row:
            found[row["id"]] = EntryId.parse(entry_id).ms + int(row["delay_ms"])
    return found
