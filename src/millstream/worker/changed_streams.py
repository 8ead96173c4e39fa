"""ChangedStreams: which of many streams to query again, as key tracking reports; and some in any case."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from millstream.clock import Clock
from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.key_tracking import KeyTracker
from millstream.redis_client.resp import Command, Reply
from millstream.worker.due_times import RoundRobin

FEW_STREAMS = 8
"""So many streams are polled instead: key tracking takes a connection of its own."""

_SWEEP_MS = 1_000.0


class ChangedStreams:
    """Queries keys of many streams for a caller that polls, at a cost that follows the changes. Used by one thread.

    A few streams are queried again in any case, round robin, since key tracking may lose invalidations: SWAPDB, for
    one, sends none.

    `keys_of`: returns the keys of a stream that are queried, all in one hash slot
    """

    def __init__(self, client: Client, clock: Clock, keys_of: Callable[[str], Sequence[str]]) -> None:
        self._clock = clock
        self._tracker = KeyTracker(client)
        self._keys_of = keys_of
        self._keys: dict[str, Sequence[str]] = {}
        self._names: dict[str, str] = {}
        self._round_robin = RoundRobin()
        self._unread: set[str] = set()
        self._sweep_due_ms = 0.0

    def close(self) -> None:
        """Close the connections of key tracking."""
        self._tracker.close()

    @property
    def refused(self) -> bool:
        """True if the server refuses key tracking, as far as known after the first `find`."""
        return self._tracker.refused

    def find(self, streams: Collection[str]) -> list[str]:
        """Return those of `streams` that have to be queried: changed since `query`, new, or due. Raises RedisError.

        If key tracking is `refused`, the new ones alone: then the caller has to poll.
        """
        changed = self._tracker.changed()
        new = self._follow(set(streams))
        now_ms = self._clock.monotonic_ms()
        is_sweep_due = now_ms >= self._sweep_due_ms
        if is_sweep_due:
            self._sweep_due_ms = now_ms + _SWEEP_MS
        if self._tracker.refused:
            return new
        if changed is None:
            return list(self._keys)
        found = {*new, *(self._names[key] for key in changed if key in self._names)}
        if is_sweep_due:
            found |= self._keys.keys() & {*self._round_robin.next_names(self._keys), *self._unread}
            self._unread.clear()
        return list(found)

    def _follow(self, streams: set[str]) -> list[str]:
        """Know the keys of these streams, and of no others; return the new streams."""
        for name in self._keys.keys() - streams:
            for key in self._keys.pop(name):
                del self._names[key]
        new = [name for name in streams if name not in self._keys]
        for name in new:
            keys = self._keys[name] = self._keys_of(name)
            self._names.update(dict.fromkeys(keys, name))
        return new

    def exists(self, streams: Collection[str]) -> Iterator[tuple[str, Reply]]:
        """Yield each of these streams and how many of its keys exist: see `query`."""
        return self.query({name: ("EXISTS", *self._keys_of_known(name)) for name in streams})

    def query(self, commands: Mapping[str, Command]) -> Iterator[tuple[str, Reply]]:
        """Send a read command about keys of each of these streams; yield stream and reply, errors too, in any order.

        Raises Unavailable: then `find` returns all streams again. Where it is the reply, as one server of a cluster is
        away, `find` returns the stream again at its next sweep: its keys are not tracked.
        """
        names = {self._keys_of_known(name)[0]: name for name in commands}
        for key, reply in self._tracker.read({key: commands[name] for key, name in names.items()}):
            if isinstance(reply, Unavailable):
                self._unread.add(names[key])
            yield names[key], reply

    def _keys_of_known(self, name: str) -> Sequence[str]:
        return self._keys.get(name) or self._keys_of(name)
