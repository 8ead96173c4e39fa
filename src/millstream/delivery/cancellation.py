"""Cancellation: which messages of a key the dead letter of an earlier one has canceled (`Retry(then="cancel")`).

The commit of that dead letter notes it with the last id that the stream has then, in the same step (`commit.lua`). So
whichever worker or task gets the messages of the key next knows it: it writes their dead letters, in order, and does
not run the handler. Later messages of the key run again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys

_AT_ONCE = 1_000


class Cancellation(NamedTuple):
    """Messages of one key were canceled: by the dead letter of the message `canceled_by`, up to the id `up_to`.

    `up_to` is None until that dead letter is committed: then all messages that were read before are canceled.
    """

    canceled_by: str
    up_to: EntryId | None = None

    @classmethod
    def parse(cls, stored: bytes) -> "Cancellation | None":
        """Parse what Redis stores for a key; b"" is None."""
        if not stored:
            return None
        canceled_by, _, up_to = stored.decode().partition(" ")
        return cls(canceled_by, EntryId.parse(up_to))

    def covers(self, entry_id: EntryId) -> bool:
        """Whether a later message of the key is canceled."""
        return self.up_to is None or entry_id <= self.up_to


def read_cancellations(client: Client, keys: HandlerKeys, queues: Sequence[bytes]) -> dict[bytes, Cancellation]:
    """Return the cancellations of those of the key queues that have one. Raises RedisError."""
    found: dict[bytes, Cancellation] = {}
    for at in range(0, len(queues), _AT_ONCE):
        some = queues[at : at + _AT_ONCE]
        for name, stored in zip(some, client.execute("HMGET", keys.canceled, *some), strict=True):
            if cancellation := Cancellation.parse(stored or b""):
                found[name] = cancellation
    return found
