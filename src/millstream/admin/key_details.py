"""KeyDetails: one key of a handler: why it waits, what waits, its state and its dead letters."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from millstream.admin.inspection import read_state, state_expiries
from millstream.delivery.dead_letter_queue import DeadLetterEntry, DeadLetterFilter, DeadLetterQueue
from millstream.delivery.key_queues import KeyQueue, explain, is_blocked, last_errors, read_queues
from millstream.delivery.keyed_stream import queue_of_key
from millstream.delivery.last_error import LastError
from millstream.errors import DecodeError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, to_wire
from millstream.redis_client.pipelining import call_all

_MOST_LETTERS = 5_000


@dataclass(frozen=True, kw_only=True)
class WaitingEntry:
    """An entry of a key queue: its id and its names and values; None if it is gone from the stream."""

    id: str
    pairs: Sequence[bytes] | None


@dataclass(frozen=True, kw_only=True)
class KeyDetails:
    """One key of a handler on one stream.

    * `queue`: its key queue, and `last`: why the last attempt on its first entry failed; None if nothing of it waits
    * `entries`: the first entries of the queue
    * `state`: None if it has none; `state_problem`: why the state cannot be read; `expires_ms`: when the state expires,
      in Unix milliseconds
    * `letters`: its dead letters, as far as they are among the first 5,000 of the handler on the stream
    """

    keys: HandlerKeys
    queue: KeyQueue | None
    last: LastError
    entries: Sequence[WaitingEntry]
    state: dict[str, Any] | None
    state_problem: str | None
    expires_ms: int | None
    letters: Sequence[DeadLetterEntry]

    @property
    def why(self) -> str:
        """What the key waits for, in words."""
        return "nothing of this key waits" if self.queue is None else explain(self.queue, self.last)

    @property
    def is_blocked(self) -> bool:
        """Whether its first entry has failed all its attempts, and is retried without end."""
        return self.queue is not None and is_blocked(self.queue, self.last)


def read_key(client: Client, keys: HandlerKeys, key: bytes, *, most: int = 20) -> KeyDetails:
    """Read a key of a handler on a stream, with at most `most` entries and dead letters. Raises RedisError."""
    name = queue_of_key(key, b"")
    queue = next(iter(read_queues(client, keys, [name])), None)
    state, problem = None, None
    try:
        state = read_state(client, keys, key)
    except DecodeError as error:
        problem = str(error)
    wanted = DeadLetterFilter(app=keys.app, handler=keys.handler, stream=keys.stream)
    letters = islice(DeadLetterQueue(client).find(wanted), _MOST_LETTERS)
    return KeyDetails(
        keys=keys,
        queue=queue,
        last=LastError() if queue is None else last_errors(client, [(keys, queue)])[0],
        entries=_first_entries(client, keys, name, most) if queue else (),
        state=state,
        state_problem=problem,
        expires_ms=state_expiries(client, keys, [key])[0],
        letters=list(islice((one for one in letters if one.letter and one.letter.key == key), most)),
    )


def _first_entries(client: Client, keys: HandlerKeys, name: bytes, most: int) -> list[WaitingEntry]:
    ids = client.execute("LRANGE", keys.queue(name), 0, most - 1)
    found = call_all(client, [("XRANGE", to_wire(keys.stream), one, one) for one in ids])
    return [
        WaitingEntry(id=one.decode(), pairs=entries[0][1] if entries else None)
        for one, entries in zip(ids, found, strict=True)
    ]
