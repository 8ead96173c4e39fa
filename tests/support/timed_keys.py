"""Expectations of the app `timed`, whose messages set, replace and cancel timers of their key."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from millstream.delivery import DelayedMessages
from millstream.model import EntryId
from millstream.redis_client.key_names import TIMER_FIELD
from millstream.testing.history import Event, Report
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

    def timer_events(self) -> list[Event]:
        """Return what commits did with timers, and which came, by the times of the server; expect the messages of these.

        The output of a message has the time of the commit.
        """
        changes = [change for entry_id, fields in self._entries("out") for change in changes_of(entry_id, fields)]
        came = []
        for entry_id, fields in self._entries("in"):
            if (name := fields.get(TIMER_FIELD.decode())) is not None:
                key = fields["key"].encode()
                self.enqueued.append(entry_id)
                self.key_of[entry_id] = key
                event = Event(kind="timer_came", stream="in", id=fields["of"], key=key, handler="work", timer=name)
                came.append(replace(event, at=EntryId.parse(entry_id).ms))
        return [*changes, *came]

    def _entries(self, stream: str) -> Iterator[tuple[str, dict[str, str]]]:
        for entry_id, pairs in self.client.execute("XRANGE", stream, "-", "+"):
            yield entry_id.decode(), text_fields(pairs)

    def check_timers(self, log: Callable[[], str]) -> Report:
        """Check all that the handler promises, also of the timers, of which some came and some did not; none is left."""
        report = self.check_keys(overlap=False, more=self.timer_events(), log=log)
        assert report.timers_set > report.timers_came > 0
        assert report.timers_canceled > 0
        assert DelayedMessages(self.client).count("in") == 0
        assert self.client.execute("EXISTS", "millstream:{in}:in:delayed") == 0
        return report


def changes_of(entry_id: str, fields: Mapping[str, str]) -> Iterator[Event]:
    """Return what the commit did with timers that wrote this output."""
    committed_ms = EntryId.parse(entry_id).ms
    for change in fields.get("timers", "").split():
        name, _, delay_ms = change.partition("=")
        yield Event(
            kind="timer_set" if delay_ms else "timer_canceled",
            stream="in",
            id=fields["id"],
            key=fields["key"].encode(),
            handler="work",
            timer=name,
            at=committed_ms,
            due=committed_ms + int(delay_ms) if delay_ms else None,
        )
