"""Firings: the record of a schedule's last firing, and the step that publishes the next one exactly once.

The record is in the hash slot of the schedule's stream, and changes in one step with the stream, by compare-and-set. So
any number of processes may publish the firings of a schedule, without a lock or a leader, and each may die at any point.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from millstream.errors import CommandFailed, ConfigError, OutputError
from millstream.handlers.encoding import encode_output
from millstream.handlers.schedule import Schedule
from millstream.producer.session import MAX_FIELDS
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import FIRING_FIELD, StreamKeys, to_wire
from millstream.redis_client.scripts import Script

READ_SCHEDULE = Script("producer/read_schedule", allow_oom=True)
FIRE = Script("producer/fire")

_RECORD = re.compile(rb"([0-9]{1,15}) ([!-~][ -~]*)")
_END_MS = int(datetime(9000, 1, 1, tzinfo=UTC).timestamp()) * 1_000
"""No record is that late: the next firing may be decades later, and dates end with the year 9999."""
_SHOWN_BYTES = 60


class FiringRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis has of a schedule.

    * `stored`: the record, byte for byte; b"" if there is none
    * `last_ms`: the firing that was published or left out last, in Unix milliseconds; without a record the server's time
    * `rule`: the rule of the schedule that wrote it; "" without a record
    * `now_ms`: the server's time when it was read, in Unix milliseconds
    """

    stored: bytes
    last_ms: int
    rule: str
    now_ms: int


class Firings:
    """The firings of one schedule in Redis. Each method raises RedisError; `publish` ConfigError for a partition."""

    def __init__(self, client: Client, schedule: Schedule) -> None:
        keys = StreamKeys(schedule.stream)
        self._client = client
        self._schedule = schedule
        self._label = schedule.label.encode()
        self._schedules = to_wire(keys.schedules)
        self._keys = (to_wire(keys.stream), self._schedules, to_wire(keys.partition))
        self.reset_command = f"HDEL {escape(keys.schedules)} {schedule.label}"
        """The command of Redis with which an operator lets the schedule begin anew."""

    def read(self) -> FiringRecord:
        """Return the record, and the server's time. Raises ConfigError for a record that no schedule has written."""
        stored, now_ms = self._client.script(READ_SCHEDULE, (self._schedules,), (self._label,))
        if not stored:
            return FiringRecord(stored=stored, last_ms=now_ms, rule="", now_ms=now_ms)
        found = _RECORD.fullmatch(stored)
        if found is None or int(found[1]) >= _END_MS:
            raise ConfigError(
                f"the record of its last firing is '{escape(stored[:_SHOWN_BYTES])}', not a time in Unix milliseconds "
                f"before the year 9000, and a rule; delete it, to let the schedule begin anew: {self.reset_command}"
            )
        return FiringRecord(stored=stored, last_ms=int(found[1]), rule=found[2].decode(), now_ms=now_ms)

    def publish(self, seen: FiringRecord, firing_ms: int, items: Sequence[bytes] = ()) -> FiringRecord | None:
        """Publish the entry of a firing, or none if it has no items, and return the new record.

        Returns None if the record is not the one that was seen: another process has published the firing.
        """
        record = f"{firing_ms} {self._schedule.rule}".encode()
        try:
            done = self._client.script(FIRE, self._keys, (self._label, seen.stored, record, firing_ms, *items))
        except CommandFailed as error:
            if error.code == "PARTITIONED":
                raise ConfigError(
                    f"{self._schedule.stream} is a partition: name a stream without partitions, and publish from its "
                    "handler with a PartitionedProducer"
                ) from error
            raise
        if not done:
            return None
        return FiringRecord(stored=record, last_ms=firing_ms, rule=self._schedule.rule, now_ms=seen.now_ms)


def encode_message(message: object, firing_ms: int) -> list[bytes]:
    """Return the items of the entry of a firing: the fields of the message, then the time of the firing.

    None for no message returns no items. Raises OutputError for a message that cannot be encoded.
    """
    if message is None:
        return []
    items = [*encode_output(message), FIRING_FIELD, b"%d" % firing_ms]
    if len(items) > 2 * MAX_FIELDS:
        raise OutputError(f"an entry has at most {MAX_FIELDS - 1:,} fields, this one {len(items) // 2 - 1:,}")
    return items
