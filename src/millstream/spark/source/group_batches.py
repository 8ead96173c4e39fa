"""Batches of a group's entries: taken by one master, held by the consumers that stand for their portions, and
acknowledged as a whole.

A batch has a number, and its ids are noted in Redis in the step that takes them, so whoever comes back after a crash
finds the same batch. Runs are fenced: the newest one that has touched a stream is in charge of what is taken from it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from millstream.errors import CommandFailed, GroupMissing, StaleOwner
from millstream.redis_client.client import Client, Command, Reply, Script, raise_if_error
from millstream.redis_client.key_names import TakenKeys, from_wire, to_wire

_CLAIM_IDLE_BATCH = Script("groups/claim_idle_batch")
_FILL_BATCH = Script("groups/fill_batch")
# What frees the list of pending entries, or keeps it as it is, must be possible at maxmemory.
_RENEW_BATCH = Script("groups/renew_batch", allow_oom=True)
_ACK_BATCH = Script("groups/ack_batch", allow_oom=True)

_CALLS_PER_TRIP = 500
_READ_AT_ONCE = 10_000  # Redis serves nobody else for about 3 ms
_PAGE = 500
_EPOCHS_OF_A_RUN = 1_000_000
FIRST = "0-0"
"""The cursor at the beginning, and at the end, of what others hold."""


class Record(NamedTuple):
    """What Redis knows of the last batch of a stream: whose it is, its number, entries in a portion, and in all of it.

    * `gone`: entries that were found to be gone from the stream since that was last told
    """

    token: str
    batch: int
    step: int
    size: int
    gone: int


class PendingCounts(NamedTuple):
    """How many entries are pending: with us and in no batch, in our batches' portions, and with others."""

    ours: int
    portions: Mapping[str, int]
    others: int


class NotOurs(NamedTuple):
    """Entries of a batch that were not ours to acknowledge: others had taken them over, or settled them already."""

    others: int
    settled: int


class BatchFill(NamedTuple):
    """How many entries a batch has, and how many were found to be gone from the stream since that was last told."""

    size: int
    gone: int


class Batches:
    """What one run takes from the group `group` of some streams, in the name of `consumer`.

    What it has taken and put into no batch is held by `consumer`, portion n of a batch by `<consumer>:<n>`. Every method
    may be repeated; each raises RedisError, GroupMissing among them, and StaleOwner once a newer run is in charge.
    """

    def __init__(self, client: Client, *, group: str, consumer: str) -> None:
        self._client = client
        self._group = group
        self._consumer = consumer
        self._portion = re.compile(f"{re.escape(consumer)}:[0-9]+")
        self._epoch = ""

    def keys(self, stream: str) -> TakenKeys:
        """Where Redis keeps what is taken from `stream`."""
        return TakenKeys(stream, self._group, self._consumer)

    @property
    def epoch(self) -> str:
        """The number of this run, greater than those before it; "" until `begin`."""
        return self._epoch

    def begin(self, streams: Iterable[str]) -> None:
        """Become the newest run. The others learn it stream by stream, as this one takes, keeps or acknowledges there.

        Called again, it fences what this run itself has asked for and had no answer to: that may still be on its way. It
        stays older than whoever has begun since.
        """
        if self._epoch:
            self._epoch = str(int(self._epoch) + 1)
            return
        asked = [("HGET", self.keys(stream).record, "epoch") for stream in streams]
        seconds, micros = map(int, self._client.execute("TIME"))
        found = [int(reply or 0) for reply in self._ask(asked)]
        # At least the server's time, so that a failover to a replica that missed the last epoch cannot repeat it.
        self._epoch = str(max([seconds * 1_000_000 + micros, *(one + _EPOCHS_OF_A_RUN for one in found)]))

    # --- what is there ---

    def records(self, streams: Iterable[str]) -> dict[str, Record]:
        """The last batch of each stream that has had one."""
        names = list(streams)
        fields = ("token", "batch", "step", "gone")
        replies = self._ask([("HMGET", self.keys(stream).record, *fields) for stream in names])
        known = {
            stream: (token.decode(), int(batch), int(step), int(gone or 0))
            for stream, (token, batch, step, gone) in zip(names, replies, strict=True)
            if token is not None
        }
        sizes = self._ask([("LLEN", self.keys(name).ids(token, number)) for name, (token, number, *_) in known.items()])
        return {
            stream: Record(token, batch, step, size, gone)
            for (stream, (token, batch, step, gone)), size in zip(known.items(), sizes, strict=True)
        }

    def held(self, streams: Iterable[str]) -> dict[str, PendingCounts]:
        """Who holds how much of each stream's pending entries."""
        names = list(streams)
        replies = self._ask([("XPENDING", stream, self._group) for stream in names])
        return {stream: self._sorted(reply) for stream, reply in zip(names, replies, strict=True)}

    def _sorted(self, summary: Reply) -> PendingCounts:
        ours, portions, others = 0, {}, 0
        for raw, count in summary[3] or ():
            name = from_wire(raw)
            if name == self._consumer:
                ours = int(count)
            elif self._portion.fullmatch(name):
                portions[name] = int(count)
            else:
                others += int(count)
        return PendingCounts(ours, portions, others)

    # --- taking ---

    def may_read(self, stream: str) -> None:
        """Raise AccessDenied if the user may not read through groups: `draw` is not answered, and would not tell."""
        reply = self._client.pipeline([("XREADGROUP", "GROUP", f"{self._group}:none", "-", "STREAMS", stream, ">")])[0]
        if not isinstance(reply, CommandFailed | GroupMissing):
            raise_if_error(reply)

    def draw(self, shares: Mapping[str, int]) -> dict[str, PendingCounts]:
        """Take up to so many entries of each stream that nobody was given; their contents stay in Redis."""
        pairs: list[tuple[Command, Command]] = []
        for stream, share in shares.items():
            counts = [_READ_AT_ONCE] * (share // _READ_AT_ONCE) + [share % _READ_AT_ONCE] * (share % _READ_AT_ONCE > 0)
            read = ("XREADGROUP", "GROUP", self._group, self._consumer, "COUNT")
            pairs += [((*read, count, "STREAMS", stream, ">"), ("XPENDING", stream, self._group)) for count in counts]
        held: dict[str, PendingCounts] = {}
        for at in range(0, len(pairs), _CALLS_PER_TRIP):
            some = pairs[at : at + _CALLS_PER_TRIP]
            for (_, asked), reply in zip(some, self._client.unanswered(some), strict=True):
                held[str(asked[1])] = self._sorted(raise_if_error(reply))
        return held

    def adopt(self, stream: str, cursor: str, *, min_idle_ms: int, most: int) -> tuple[str, int, int]:
        """Take over a page of what was held for so long, `most` at most.

        Returns the next cursor, how many they are, and how many were found to be gone since that was last told.
        """
        (reply,) = self._run(_CLAIM_IDLE_BATCH, {stream: (min_idle_ms, cursor, min(most, _PAGE))})
        return reply[0].decode(), reply[1], reply[2]

    def recall(self, held: Mapping[str, PendingCounts]) -> None:
        """Take back what the portions of batches hold that are none any more."""
        for stream, shares in held.items():
            for portion in shares.portions:
                while self._run(_RENEW_BATCH, {stream: (self._consumer, "-")}, consumer=portion)[0]:
                    pass

    def fill(self, token: str, batch: int, sizes: Mapping[str, int], *, step: int) -> dict[str, BatchFill]:
        """Put up to so many of the entries that we hold of each stream into a batch, in portions of `step`."""
        filled: dict[str, BatchFill] = {}
        left = {stream: (token, batch, step, size) for stream, size in sizes.items()}
        while left:
            for stream, (size, more, gone) in zip(
                list(left), self._run(_FILL_BATCH, left, batch=(token, batch)), strict=True
            ):
                filled[stream] = BatchFill(size, gone)
                if not more or size >= sizes[stream]:
                    del left[stream]
        return filled

    # --- holding, and letting go ---

    def keep(self, streams: Iterable[str]) -> None:
        """Say that we are still at work on what we hold, so that nobody takes it over. What others hold they keep.

        Raises GroupMissing only when all other streams are done: they must not be lost to others for that.
        """
        missing: GroupMissing | None = None
        for stream in streams:
            try:
                self._keep(stream)
            except GroupMissing as error:
                missing = missing or error
        if missing is not None:
            raise missing

    def _keep(self, stream: str) -> None:
        for name in (self._consumer, *self.held([stream])[stream].portions):
            after = "-"
            while after:
                (last,) = self._run(_RENEW_BATCH, {stream: (name, after)}, consumer=name)
                after = f"({last.decode()}" if last else ""

    def acknowledge(self, token: str, batch: int, streams: Iterable[str]) -> dict[str, NotOurs]:
        """Acknowledge a batch, but for what is not ours any more: how many those entries are."""
        found = dict.fromkeys(streams, NotOurs(0, 0))
        left: dict[str, Sequence[Any]] = dict.fromkeys(found, ())
        while left:
            for stream, (more, others, settled) in zip(
                list(left), self._run(_ACK_BATCH, left, batch=(token, batch)), strict=True
            ):
                found[stream] = NotOurs(found[stream].others + others, found[stream].settled + settled)
                if not more:
                    del left[stream]
        return found

    def forget(self, records: Mapping[str, Record]) -> None:
        """Drop the ids of batches that nobody will come back to."""
        self._ask([("UNLINK", self.keys(stream).ids(one.token, one.batch)) for stream, one in records.items()])

    def told(self, gone: Mapping[str, int]) -> None:
        """Note that the user knows of so many entries that are gone from each stream."""
        self._ask([("HINCRBY", self.keys(stream).record, "gone", -count) for stream, count in gone.items() if count])

    # --- inside ---

    def _run(
        self,
        script: Script,
        args: Mapping[str, Sequence[Any]],
        *,
        consumer: str = "",
        batch: tuple[str, int] | None = None,
    ) -> list[Reply]:
        """Run a script on each stream; replies in order."""
        common = (self._epoch, to_wire(self._group), consumer or self._consumer)
        calls = []
        for stream, rest in args.items():
            keys = self.keys(stream)
            ids = (keys.ids(*batch),) if batch else ()
            calls.append((script, (stream, keys.record, *ids), (*common, *rest)))
        try:
            return [
                reply
                for at in range(0, len(calls), _CALLS_PER_TRIP)
                for reply in self._client.scripts(calls[at : at + _CALLS_PER_TRIP])
            ]
        except CommandFailed as error:
            if error.code == "STALE":
                raise StaleOwner(
                    f"a newer run takes entries from the group {self._group!r} as the consumer {self._consumer!r}; this "
                    "one stops. If they are two queries, give each a consumer name of its own"
                ) from error
            raise

    def _ask(self, commands: Sequence[Command]) -> list[Reply]:
        return [
            raise_if_error(reply)
            for at in range(0, len(commands), _CALLS_PER_TRIP)
            for reply in self._client.pipeline(commands[at : at + _CALLS_PER_TRIP])
        ]
