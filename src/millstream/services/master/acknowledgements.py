"""Takes in what consumers have done, many calls together, and gives each of them what is next."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from millstream.observability import metrics as m
from millstream.observability.metrics import NOBODY, Metrics
from millstream.redis_client.client import Client, raise_if_error
from millstream.services.master.delegation import Delegator
from millstream.services.master.registry import Registration, Registry
from millstream.services.web.errors import Refused

logger = logging.getLogger(__name__)

_FINISHED_AT_ONCE = 500
"""Messages that are ended in one step, during which Redis serves nobody else."""


class Done(NamedTuple):
    """What a consumer says that it has done, in one call."""

    consumer: str
    ids: Sequence[bytes]


class Acknowledgement(NamedTuple):
    """What became of such a call.

    * `fresh`: how many of its messages are done only now
    * `next`: ids that the consumer was given just now
    * `refused`: its messages that were not the consumer's to end, and why
    """

    fresh: int
    next: Sequence[bytes]
    refused: Sequence[tuple[bytes, Refused]]


class _Message(NamedTuple):
    call: int
    consumer: str
    id: bytes


class Acknowledger:
    """Ends messages in the name of consumers. Threads may share it. Its method raises RedisError."""

    def __init__(self, client: Client, registry: Registry, desk: Delegator, *, metrics: Metrics = NOBODY) -> None:
        self._client = client
        self._registry = registry
        self._desk = desk
        self._metrics = metrics

    def acknowledge(self, calls: Sequence[Done]) -> list[Acknowledgement]:
        """End these messages, and their consumers' turns with the tickets; then give the consumers what is next.

        May be repeated.
        """
        messages = [_Message(number, call.consumer, one) for number, call in enumerate(calls) for one in call.ids]
        ready, done, registered = self._finish(messages)
        fresh: Counter[int] = Counter()
        refused: list[list[tuple[bytes, Refused]]] = [[] for _ in calls]
        for message, is_done in zip(messages, done, strict=True):
            try:
                fresh[message.call] += is_done or self._settle(message)
            except Refused as refusal:
                refused[message.call].append((message.id, refusal))
        if fresh.total():
            self._metrics.count(m.COMMITTED, fresh.total(), handler=self._desk.label)
        wanted: Counter[str] = Counter()
        for number, call in enumerate(calls):
            is_so = len(call.ids) > len(refused[number])  # the answer may have been lost: it gets a message then, too
            wanted[call.consumer] += max(int(is_so), fresh[number])
        registered = self._revived(registered)
        given: dict[str, list[bytes]] = {}
        if ready or not all(done):
            given = self._desk.deal_all(
                [(name, registered[name], wanted[name]) for name in +wanted if name in registered]
            )
        return [
            # What a consumer is given is said with its first call.
            Acknowledgement(fresh[number], given.pop(call.consumer, ()), refused[number])
            for number, call in enumerate(calls)
        ]

    def _finish(self, messages: Sequence[_Message]) -> tuple[int, list[bool], dict[str, Registration]]:
        """End what the consumers hold; also how many lines are ready then, and who is registered."""
        lines = self._desk.lines_of([(message.consumer, message.id) for message in messages])
        finishing = [(message.consumer, message.id, line) for message, line in zip(messages, lines, strict=True)]
        names = list(dict.fromkeys(message.consumer for message in messages))
        portions = [finishing[at : at + _FINISHED_AT_ONCE] for at in range(0, len(finishing), _FINISHED_AT_ONCE)]
        *replies, found = self._client.pipeline(
            [*map(self._desk.stream.to_finish, portions), self._registry.to_get(names)]
        )
        ready, done = 0, list[bool]()
        for portion, reply in zip(portions, replies, strict=True):
            ready, some = self._desk.stream.finished(portion, reply)
            done += some
        return ready, done, self._registry.got(names, raise_if_error(found))

    def _settle(self, message: _Message) -> bool:
        """Whether a message that its consumer does not hold is done only now; raises Refused if another has done it."""
        name, entry_id = message.consumer, message.id
        what, who = self._desk.settle(name, entry_id)
        if what == "taken":
            logger.warning(
                "consumer %s has taken message %s itself, out of order, and acknowledged it", name, entry_id.decode()
            )
        if what in ("settled", "taken"):
            return True
        if what == "done" and who == name:
            return False
        raise self._desk.not_held(name, entry_id, what, who)

    def _revived(self, registered: dict[str, Registration]) -> dict[str, Registration]:
        """The same, where whoever was stuck is not any more: it has ended a message, or come to its end too late."""
        for name, found in list(registered.items()):
            if found.state == "stuck":
                self._registry.mark(name, "alive")
                if (fresh := self._registry.get(name)) is not None:
                    registered[name] = fresh
        return registered
