"""Reads all states of a handler, of many streams at once, with bounded memory. Only reads."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from millstream.delivery.commit_store import FORMAT, describe_newer_format
from millstream.delivery.state_expiry import live_states_and_expiries
from millstream.errors import ConfigError, MillstreamError
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import PREFIX, HandlerKeys, from_wire, to_wire
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.resp import Command, Node, Reply, RespConnection

_HASHES_AT_ONCE = 64
_FIRST_KEYS, _MAX_KEYS = 16, 5_000
_GROWTH_FACTOR = 8
_PAGE_BYTES = 4 * 2**20
_START = b"0"


class StoredState(NamedTuple):
    """The state of a key, as it was committed (see `decode_version_and_state`), and the expiry that is stored with it (see
    `split_expiry`).
    """

    stream: str
    key: bytes
    blob: bytes
    expires_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class StateHash:
    """The states of a handler on one stream, and how many keys have one."""

    keys: HandlerKeys
    count: int


def state_hashes(client: Client, app: str, handler: str, streams: Sequence[str] = ()) -> list[StateHash]:
    """The states of a handler, stream by stream, sorted; of these `streams` or, by a scan, of all on which it has run.

    Raises MillstreamError if it has run on none of them, or if a newer millstream has stored the states, and
    RedisError.
    """
    places = [HandlerKeys(app, handler, stream) for stream in streams] or _find(client, f"{app}.{handler}")
    counts = call_all(client, [("HLEN", to_wire(one.state)) for one in places])
    if not any(counts) and not any(call_all(client, [("HLEN", to_wire(one.meta)) for one in places])):
        raise _never_run(f"{app}.{handler}", "these streams")
    formats = call_all(client, [("HGET", to_wire(one.meta), "format") for one in places])
    for place, stored in zip(places, formats, strict=True):
        if stored is not None and int(stored) > FORMAT:
            raise MillstreamError(f"{place.label} on {place.stream} is {describe_newer_format(int(stored))}")
    return [StateHash(keys=place, count=count) for place, count in zip(places, counts, strict=True)]


def _find(client: Client, label: str) -> list[HandlerKeys]:
    """The handler on each stream of which it has a state or metadata."""
    found: set[HandlerKeys] = set()
    for name in chain.from_iterable(client.scan_key_pages(f"{PREFIX}:*:{label}:[ms][et]*")):
        try:
            keys = HandlerKeys.parse(from_wire(name))
        except ConfigError:
            continue  # a key of another program
        if keys.label == label and from_wire(name) in (keys.state, keys.meta):
            found.add(keys)
    if not found:
        raise _never_run(label, "this Redis")
    return sorted(found, key=lambda keys: keys.stream)


def _never_run(label: str, where: str) -> MillstreamError:
    return MillstreamError(f"no handler {label!r} has run on {where}; millstream info shows those that have")


def scan_states(client: Client, places: Sequence[HandlerKeys]) -> Iterator[list[StoredState]]:
    """Yield the states of a handler on `places`, in pages of about 4 MB, or one state that is larger.

    Each is one that was committed. A key that has a state all the time is among them; it may come twice if many others
    lose theirs meanwhile (Redis HSCAN). Memory: two pages. Raises Unavailable if a connection breaks or a hash slot moves:
    what follows is unknown then, as another server has another order; begin anew.
    """
    # A command follows redirections, and so learns which node has the slots now.
    call_all(client, [("HLEN", to_wire(place.state)) for place in places])
    by_node: dict[Node | None, list[HandlerKeys]] = {}
    for place in places:
        by_node.setdefault(client.shard(to_wire(place.state)).primary, []).append(place)
    for node, some in by_node.items():
        # A connection of its own: a client opens a lost one again, perhaps to another server, where a cursor means
        # something else.
        with closing(client.dial(node)) as connection:
            yield from _NodeScan(client, connection, some).pages()


class _NodeScan:
    """Scans hashes on one server, some side by side, and asks for the next page before it hands out the last one."""

    def __init__(self, client: Client, connection: RespConnection, places: Sequence[HandlerKeys]) -> None:
        self._client = client
        self._connection = connection
        self._waiting = deque(places)
        self._cursors: dict[HandlerKeys, bytes] = {}
        self._keys_wanted = _FIRST_KEYS

    def pages(self) -> Iterator[list[StoredState]]:
        asked = self._ask()
        while asked:
            page = [state for place, reply in self._replies(asked) for state in self._take(place, reply)]
            self._resize(page)
            asked = self._ask()
            if page:
                yield page

    def _ask(self) -> list[HandlerKeys]:
        """Ask for the next states of each open hash."""
        while self._waiting and len(self._cursors) < _HASHES_AT_ONCE:
            self._cursors[self._waiting.popleft()] = _START
        asked = list(self._cursors)
        if asked:
            count = max(1, self._keys_wanted // len(asked))
            commands: list[Command] = [
                ("HSCAN", to_wire(place.state), self._cursors[place], "COUNT", count) for place in asked
            ]
            self._connection.send(commands)
        return asked

    def _replies(self, asked: Sequence[HandlerKeys]) -> Iterator[tuple[HandlerKeys, Reply]]:
        left = deque(asked)
        while left:
            for reply in self._connection.wait_and_receive(self._client.timeout_ms):
                yield left.popleft(), raise_if_error(reply)

    def _take(self, place: HandlerKeys, reply: Reply) -> Iterator[StoredState]:
        cursor, items = reply
        if cursor == _START:
            del self._cursors[place]
        else:
            self._cursors[place] = cursor
        states = live_states_and_expiries(self._client, to_wire(place.state), items[1::2])
        found = zip(items[::2], states, strict=True)
        return (StoredState(place.stream, key, *state) for key, state in found if state is not None)

    def _resize(self, page: Sequence[StoredState]) -> None:
        """Ask for as many keys as have about a page of bytes; for few more than before, as larger ones may follow."""
        size = sum(len(one.key) + len(one.blob) for one in page)
        fitting = _PAGE_BYTES * len(page) // size if size else _MAX_KEYS
        self._keys_wanted = max(1, min(fitting, _GROWTH_FACTOR * self._keys_wanted, _MAX_KEYS))
