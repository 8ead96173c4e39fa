"""Where a key has messages that wait, a state or dead letters, among many streams."""

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.admin.timed_reads import TimedReads, is_left_out
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.dead_letter_queue import DeadLetterQueue
from millstream.delivery.keyed_stream import queue_of_key
from millstream.delivery.state_expiry import live_states
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, to_wire
from millstream.redis_client.resp import Command, Reply


@dataclass(frozen=True, kw_only=True)
class KeyPlaces:
    """The handlers on streams that have something of a key; `searched`: on how many streams it was looked for.

    `is_partial`: there may be more, also dead letters on those that were searched.
    """

    found: Sequence[HandlerKeys]
    searched: int
    is_partial: bool


def find_key_places(
    client: Client,
    places: Sequence[HandlerKeys],
    key: bytes,
    *,
    budget_ms: float = 1_000.0,
    clock: Clock = SYSTEM_CLOCK,
) -> KeyPlaces:
    """Look for a key of handlers on these streams, for about `budget_ms` milliseconds. Raises RedisError."""
    reads = TimedReads(client, budget_ms, clock=clock)
    found, searched = search_key(reads, places, key)
    return KeyPlaces(found=found, searched=searched, is_partial=reads.is_partial)


def search_key(reads: TimedReads, places: Sequence[HandlerKeys], key: bytes) -> tuple[list[HandlerKeys], int]:
    """Those of `places` that have something of the key, and on how many it was looked for. Raises RedisError.

    Four commands for each of them. Dead letters come last: where the key has nothing else, all of them are read.
    """
    name = queue_of_key(key, b"")
    commands: list[tuple[HandlerKeys, Command]] = []
    for one in places:
        commands += [
            (one, ("XLEN", to_wire(one.dead_letters))),
            (one, ("HGET", to_wire(one.state), key)),
            (one, ("EXISTS", one.queue(name))),
            (one, ("HEXISTS", to_wire(one.parked), name)),
        ]
    having: dict[HandlerKeys, None] = {}
    with_letters: list[HandlerKeys] = []
    searched = 0
    replies = iter(reads.replies(commands))
    for (one, letters), *others in zip(replies, replies, replies, replies, strict=True):
        searched += 1
        if any(_is_there(reads.client, one, reply) for _, reply in others):
            having[one] = None
        elif letters and not isinstance(letters, RedisError):
            with_letters.append(one)
    having |= dict.fromkeys(one for one in with_letters if _has_letter(reads, one, key))
    return list(having), searched


def _is_there(client: Client, keys: HandlerKeys, reply: Reply) -> bool:
    """Whether a state has not expired, or something exists."""
    if isinstance(reply, RedisError):
        return False
    return bool(live_states(client, to_wire(keys.state), [reply])[0] if isinstance(reply, bytes) else reply)


def _has_letter(reads: TimedReads, keys: HandlerKeys, key: bytes) -> bool:
    """Whether one of the dead letters has the key, as far as there is time to read them."""
    if reads.is_over():
        return False
    try:
        for entry in DeadLetterQueue(reads.client).newest(keys):
            if entry.letter is not None and entry.letter.key == key:
                return True
            if reads.is_over():
                return False
    except RedisError as error:
        if not is_left_out(error):
            raise
    return False
