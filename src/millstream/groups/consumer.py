"""Consumer: reads the new entries of a group, and again the entries that are pending with it."""

from collections.abc import Mapping, Sequence

from millstream.errors import ConfigError
from millstream.groups.entries import BEGINNING, Batch, Id, check_position, execute_on, recovered_batch, wire_id
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import to_wire
from millstream.redis_client.resp import Arg


class Consumer:
    """The consumer `name` of `group` on one or several streams.

    A name must belong to one living consumer, and stay the same after its restart: Redis stores the pending entries
    under it. On Redis Cluster the streams must share a hash slot. Each method raises RedisError, GroupMissing among
    them. A connection that breaks during `read_new` may have delivered entries all the same: read the pending ones
    again.
    """

    def __init__(self, client: Client, *, group: str, name: str, streams: Sequence[str]) -> None:
        _check_streams(streams)
        self._client = client
        self._group = to_wire(group)
        self._streams = {to_wire(stream): stream for stream in streams}
        self._label = streams[0] if len(streams) == 1 else f"one of {', '.join(streams)}"
        self._head: tuple[Arg, ...] = ("XREADGROUP", "GROUP", self._group, to_wire(name))
        self._new_tail: tuple[Arg, ...] = ("STREAMS", *self._streams, *[">"] * len(self._streams))

    @property
    def streams(self) -> list[str]:
        """The names of its streams."""
        return list(self._streams.values())

    def read_new(self, *, count: int = 100, block_ms: int = 0, noack: bool = False) -> list[Batch]:
        """Fetch up to `count` entries of each stream that the group has not delivered yet (XREADGROUP with ">").

        [] if there are none.

        `block_ms` > 0 waits that long for the first one, on the client's one connection, so that other threads with
        that client wait too. With `noack` they count as acknowledged at once: entries in a lost reply stay lost. Raises
        ConfigError if the client would time out before the wait ends, or for a count below 1.
        """
        _check_count(count)
        options: tuple[Arg, ...] = ("COUNT", count)
        if block_ms:
            if block_ms >= self._client.timeout_ms:
                raise ConfigError(
                    f"block_ms={block_ms} is not below the client's timeout of {self._client.timeout_ms} ms: "
                    "give it a client with a longer timeout_ms"
                )
            options += ("BLOCK", block_ms)
        if noack:
            options += ("NOACK",)
        reply = execute_on(self._client, self._label, *self._head, *options, *self._new_tail)
        return [Batch(self._streams[stream], entries) for stream, entries in reply or ()]

    def read_pending(self, *, after: Id | Mapping[str, Id] = BEGINNING, count: int = 100) -> list[Batch]:
        """Read again up to `count` entries of each stream that are pending with this consumer (XREADGROUP).

        `after`: an id; only greater ids are read.

        A mapping has an id for each stream, and leaves out the streams that it does not name. Never waits. Redis resets
        their idle time and adds one to their delivery counts. Raises ConfigError for an invalid id, such as ">", which
        would fetch new entries, and for a count below 1.
        """
        _check_count(count)
        places = after if isinstance(after, Mapping) else dict.fromkeys(self._streams.values(), after)
        for place in places.values():
            check_position("the id that read_pending reads after", place)
        streams = [to_wire(stream) for stream in places]
        ids = [wire_id(place) for place in places.values()]
        reply = execute_on(self._client, self._label, *self._head, "COUNT", count, "STREAMS", *streams, *ids)
        return [recovered_batch(self._streams[stream], entries) for stream, entries in reply or ()]

    def ack(self, stream: str, ids: Sequence[bytes | str]) -> int:
        """Acknowledge entries (XACK), also those of other consumers; return how many were pending. Safe to repeat."""
        return int(self._client.execute("XACK", to_wire(stream), self._group, *ids)) if ids else 0


def _check_streams(streams: Sequence[str]) -> None:
    if not streams:
        raise ConfigError("a consumer needs at least one stream to read")
    if isinstance(streams, str | bytes):
        raise ConfigError(f"streams={streams!r} is one name, not a list of names: write streams=[{streams!r}]")
    if any(not isinstance(stream, str) or not stream for stream in streams):
        raise ConfigError('stream names must be non-empty text, like streams=["orders"]')


def _check_count(count: int) -> None:
    if count < 1:
        raise ConfigError(f"count={count}: Redis would read without a limit; use 1 or more")
