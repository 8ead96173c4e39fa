"""Protocols of per-key order as explicit-state models: every order of steps is tried, and each violation is traced.

`KeyQueueProtocol` is the protocol of the key queues in `millstream.redis_client.lua`, call by call. `Memo` is the protocol it
replaces, as "Redis streaming concurrency with master and consumers" (Dwarves Memo) describes it. A model is small: a
few messages, two workers, a few faults.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

Step = tuple[str, Any]
"""The name of a step, and the state after it."""


class Model(Protocol):
    """A protocol: its first state, the steps of each state, and the properties violated in a state."""

    def begin(self) -> Any:
        """The first state."""

    def steps(self, state: Any) -> Iterator[Step]:
        """All steps that can be taken from a state."""

    def representative(self, state: Any) -> Any:
        """The same for states that differ only in which worker is which: from one of them all that follows is known."""

    def wrong(self, state: Any) -> Iterator[str]:
        """Names of the properties that do not hold in a state."""

    def wrong_at_end(self, state: Any) -> Iterator[str]:
        """Names of the properties that do not hold in a state without steps."""


@dataclass
class Explored:
    """How many states there are, and for each violated property one of the shortest ways to it."""

    states: int = 0
    traces: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{name}:\n  " + "\n  ".join(trace) for name, trace in self.traces.items()]
        return f"{self.states} states\n" + "\n".join(parts)


def explore(model: Model, *, until: str = "") -> Explored:
    """Visit every state, nearest first; or only until the property `until` is violated."""
    first = model.begin()
    came: dict[Any, tuple[Any, str]] = {model.representative(first): (None, "")}
    found = Explored()
    level = [(first, model.representative(first))]
    while level and until not in found.traces:
        following = []
        for state, place in level:
            at_end = True
            for label, after in model.steps(state):
                at_end = False
                if (next_place := model.representative(after)) not in came:
                    came[next_place] = (place, label)
                    following.append((after, next_place))
            wrong = [*model.wrong(state), *(model.wrong_at_end(state) if at_end else ())]
            for name in wrong:
                if name not in found.traces:
                    found.traces[name] = _trace(came, place)
        level = following
    found.states = len(came)
    return found


def _trace(came: dict[Any, tuple[Any, str]], state: Any) -> list[str]:
    labels = []
    while came[state][0] is not None:
        state, label = came[state]
        labels.append(label)
    return labels[::-1]


def _with(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


# --- The protocol of key queues ---


class Lease(NamedTuple):
    """A lease as its worker knows it: `running` is its first message; `asking` has sent a commit without a reply so
    far.
    """

    key: str
    token: int
    ids: tuple[int, ...]
    running: bool = False
    asking: bool = False


class Worker(NamedTuple):
    """The state of a worker: its incarnation, its leases, and the id after which it has read the stream."""

    incarnation: int = 0
    leases: tuple[Lease, ...] = ()
    read_after: int | None = None


class KeyQueueState(NamedTuple):
    """Redis, the workers, and how many faults may still come."""

    enqueued: int
    queues: tuple[tuple[int, ...], ...]
    ready: tuple[str, ...]
    owners: tuple[tuple[int, int, int] | None, ...]  # worker, its incarnation, token
    expired: tuple[bool, ...]
    newest: tuple[int, ...]  # last token of each key
    answered: tuple[tuple[int, int] | None, ...]
    workers: tuple[Worker, ...]
    committed: tuple[int, ...]
    stale: bool  # an older token has committed
    crashes: int
    expiries: int
    losses: int


@dataclass(frozen=True, kw_only=True)
class KeyQueueProtocol:
    """The protocol of key queues, for the messages with these keys.

    * `aborts`: a worker stops before its lease ends; otherwise it may sleep at any time, and wake at any later time
    * `without`: checks that are left out: of a commit its "token", that its message is "first", and the "answer" to a
      repetition; that the "enqueued" id is where a router has read from; which leases a worker has "known"; and that a
      leased queue is not ready ("exclusive")
    """

    messages: str
    workers: int = 2
    run: int = 2
    crashes: int = 1
    expiries: int = 1
    losses: int = 1
    aborts: bool = True
    without: frozenset[str] = frozenset()

    @cached_property
    def keys(self) -> str:
        """Each key once."""
        return "".join(sorted(set(self.messages)))

    def begin(self) -> KeyQueueState:
        """All messages are in the stream, and nothing else exists."""
        each = len(self.keys)
        return KeyQueueState(
            0,
            ((),) * each,
            (),
            (None,) * each,
            (False,) * each,
            (0,) * each,
            (None,) * self.workers,
            (Worker(),) * self.workers,
            (),
            False,
            self.crashes,
            self.expiries,
            self.losses,
        )

    def representative(self, state: KeyQueueState) -> KeyQueueState:
        """The state with its workers in an order that depends on nothing but what each of them knows."""
        known = [_known_to(worker) for worker in state.workers]
        if known == sorted(known):
            return state
        order = sorted(range(self.workers), key=known.__getitem__)
        return state._replace(
            workers=tuple([state.workers[w] for w in order]),
            answered=tuple([state.answered[w] for w in order]),
            owners=tuple([owner and (order.index(owner[0]), *owner[1:]) for owner in state.owners]),
        )

    def steps(self, state: KeyQueueState) -> Iterator[Step]:
        """The possible steps of each worker, of each lease, and of faults."""
        for label, after in self._steps(state):
            yield label, _renumbered(after)

    def _steps(self, s: KeyQueueState) -> Iterator[Step]:
        for w, worker in enumerate(s.workers):
            yield from self._enqueue(s, w, worker)
            yield from self._lease_key(s, w, worker)
            yield from self._recover(s, w, worker)
            for at, lease in enumerate(worker.leases):
                yield from self._work(s, w, at, lease)
            if s.crashes and (worker.leases or worker.read_after is not None):
                crashed = s._replace(crashes=s.crashes - 1)
                yield f"w{w} dies and begins anew", self._known(crashed, w, Worker(worker.incarnation + 1))
        for k, key in enumerate(self.keys):
            owner = s.owners[k]
            if owner and not s.expired[k]:
                gone = s._replace(expired=_with(s.expired, k, True))
                leases = [lease for worker in s.workers for lease in worker.leases if lease.token == owner[2]]
                if not leases:  # no worker renews it
                    yield f"the lease on {key} ends", gone
                elif s.expiries and not (self.aborts and leases[0].running):
                    yield f"the lease on {key} ends too early", gone._replace(expiries=s.expiries - 1)

    def _known(self, s: KeyQueueState, w: int, worker: Worker) -> KeyQueueState:
        return s._replace(workers=_with(s.workers, w, worker))

    def _enqueue(self, s: KeyQueueState, w: int, worker: Worker) -> Iterator[Step]:
        if worker.read_after is None:
            if s.enqueued < len(self.messages):
                yield (
                    f"w{w} reads the stream after {s.enqueued}",
                    self._known(s, w, worker._replace(read_after=s.enqueued)),
                )
            return
        after = self._known(s, w, worker._replace(read_after=None))
        if worker.read_after == s.enqueued or "enqueued" in self.without:
            first, last = worker.read_after, min(worker.read_after + 2, len(self.messages))
            for n in range(first, last):
                k = self.keys.index(self.messages[n])
                if not after.queues[k] and after.owners[k] is None:
                    after = after._replace(ready=(*after.ready, self.messages[n]))
                after = after._replace(queues=_with(after.queues, k, (*after.queues[k], n)))
            after = after._replace(enqueued=max(last, s.enqueued))
        yield f"w{w} enqueues after {worker.read_after}", after

    def _end(self, s: KeyQueueState, k: int, *, first: bool) -> KeyQueueState:
        s = s._replace(owners=_with(s.owners, k, None), expired=_with(s.expired, k, False))
        if not s.queues[k]:
            return s
        return s._replace(ready=(self.keys[k], *s.ready) if first else (*s.ready, self.keys[k]))

    def _lease_key(self, s: KeyQueueState, w: int, worker: Worker) -> Iterator[Step]:
        if len(worker.leases) == 2:
            return
        after = s
        for k, is_over in enumerate(s.expired):
            if is_over:
                after = self._end(after, k, first=True)
        ready = after.ready
        if "exclusive" in self.without:
            ready = ready or tuple(key for key, queue in zip(self.keys, s.queues, strict=True) if queue)
        if not ready:
            return
        key, *rest = ready
        k, token = self.keys.index(key), max(s.newest) + 1
        owned = after._replace(
            ready=tuple(rest),
            owners=_with(after.owners, k, (w, worker.incarnation, token)),
            newest=_with(s.newest, k, token),
        )
        lease = Lease(key, token, after.queues[k][: self.run])
        yield (
            f"w{w} leases {key} with token {token}",
            self._known(owned, w, worker._replace(leases=(*worker.leases, lease))),
        )
        if s.losses:
            yield f"w{w} leases {key} with token {token}, and the reply is lost", owned._replace(losses=s.losses - 1)

    def _recover(self, s: KeyQueueState, w: int, worker: Worker) -> Iterator[Step]:
        known = {lease.token for lease in worker.leases} if "known" not in self.without else set()
        after = s
        for k, owner in enumerate(s.owners):
            if owner and owner[0] == w and owner[2] not in known:
                after = self._end(after, k, first=True)
        if after is not s:
            yield f"w{w} ends the leases that it does not know", after

    def _work(self, s: KeyQueueState, w: int, at: int, lease: Lease) -> Iterator[Step]:
        k = self.keys.index(lease.key)
        is_owner = s.owners[k] is not None and s.owners[k][2] == lease.token  # type: ignore[index]

        def become(state: KeyQueueState, *leases: Lease) -> KeyQueueState:
            worker = state.workers[w]
            return self._known(
                state, w, worker._replace(leases=(*worker.leases[:at], *leases, *worker.leases[at + 1 :]))
            )

        if not lease.running:
            if not lease.ids:
                after = self._end(s, k, first=False) if is_owner else s
                yield f"w{w} ends its lease on {lease.key}", become(after)
            elif not self.aborts or (is_owner and not s.expired[k]):
                yield f"w{w} starts {lease.key}{lease.ids[0]}", become(s, lease._replace(running=True))
        if lease.running and not lease.asking and self.aborts:
            yield f"w{w} aborts {lease.key}{lease.ids[0]}", become(s)
        if not is_owner:
            yield f"w{w} detects that it has lost {lease.key}", become(s)
        elif s.expired[k]:
            yield f"w{w} extends its lease on {lease.key}", s._replace(expired=_with(s.expired, k, False))
        if lease.running:
            after, accepted = self._commit(s, w, k, lease, is_owner=is_owner)
            word = "commits" if accepted else "is refused"
            known_after = (Lease(lease.key, lease.token, lease.ids[1:]),) if accepted else ()
            yield f"w{w} {word} {lease.key}{lease.ids[0]} under token {lease.token}", become(after, *known_after)
            if s.losses:
                asking = become(after._replace(losses=s.losses - 1), lease._replace(asking=True))
                yield f"w{w} {word} {lease.key}{lease.ids[0]} under token {lease.token}, and the reply is lost", asking

    def _commit(self, s: KeyQueueState, w: int, k: int, lease: Lease, *, is_owner: bool) -> tuple[KeyQueueState, bool]:
        call = (lease.token, lease.ids[0])
        if lease.asking and s.answered[w] == call and "answer" not in self.without:
            return s, True
        is_first = s.queues[k][:1] == lease.ids[:1] or "first" in self.without
        if not (is_first and (is_owner or "token" in self.without)):
            return s, False
        left = tuple(n for n in s.queues[k] if n != lease.ids[0])
        after = s._replace(
            queues=_with(s.queues, k, left),
            committed=(*s.committed, lease.ids[0]),
            answered=_with(s.answered, w, call),
            stale=s.stale or lease.token != s.newest[k],
        )
        return after, True

    def wrong(self, s: KeyQueueState) -> Iterator[str]:
        """See the names."""
        if len(set(s.committed)) < len(s.committed):
            yield "a message is committed twice"
        if s.stale:
            yield "an older token commits"
        for k, key in enumerate(self.keys):
            done = [n for n in s.committed if self.messages[n] == key]
            if done != sorted(done):
                yield "a key is committed out of order"
            waiting = list(s.queues[k])
            should = [n for n in range(s.enqueued) if self.messages[n] == key and n not in s.committed]
            if waiting != should:
                yield "a key queue is not what is to be done of its key, in order"
            places = s.ready.count(key) + (s.owners[k] is not None)
            if places > 1 or (waiting and not places):
                yield "a key queue is in no place, or in two"
            if sum(t.running and t.key == key for worker in s.workers for t in worker.leases) > 1:
                yield "two workers run one key"

    def wrong_at_end(self, s: KeyQueueState) -> Iterator[str]:
        """All must be done."""
        if len(s.committed) < len(self.messages):
            yield "a message is never committed"


def _known_to(worker: Worker) -> tuple[Any, ...]:
    return worker.incarnation, -1 if worker.read_after is None else worker.read_after, worker.leases


def _renumbered(s: KeyQueueState) -> KeyQueueState:
    """The same state with the lowest tokens in the same order, so that the number of states stays finite."""
    leases = [lease for worker in s.workers for lease in worker.leases]
    asked = {(lease.token, lease.ids[0]) for lease in leases if lease.asking}
    answered = tuple([call if call in asked else None for call in s.answered])
    tokens = sorted({lease.token for lease in leases} | {*s.newest, 0})
    if tokens[-1] == len(tokens) - 1:  # they are the lowest already, as after most steps
        return s if answered == s.answered else s._replace(answered=answered)
    low = {token: n for n, token in enumerate(tokens)}
    workers = tuple(
        worker._replace(leases=tuple(lease._replace(token=low[lease.token]) for lease in worker.leases))
        for worker in s.workers
    )
    return s._replace(
        newest=tuple(low[one] for one in s.newest),
        workers=workers,
        owners=tuple(owner and (owner[0], owner[1], low[owner[2]]) for owner in s.owners),
        answered=tuple(call and (low[call[0]], call[1]) for call in answered),
    )


# --- The protocol of the memo ---


class MemoState(NamedTuple):
    """The pending list, the master's maps in Redis, and the next actions of master and consumers."""

    given: int
    pending: tuple[int | None, ...]  # the consumer; MASTER
    tickets: tuple[tuple[int, tuple[int, ...]] | None, ...]
    master: tuple[str, int, int] | None
    consumers: tuple[tuple[str, int] | None, ...]
    applied: tuple[int, ...]
    crashes: int
    alarms: int
    losses: int


MASTER = -1


@dataclass(frozen=True, kw_only=True)
class Memo:
    """The memo's protocol, for messages of these tickets, where each of its steps succeeds.

    The master reads with XREADGROUP and assigns to a consumer with XCLAIM; the consumer reads its entries with
    XREADGROUP 0, processes them, sends XACK, and then notifies the master. `alarms`: health checks of a live consumer
    that fail.
    """

    messages: str
    consumers: int = 2
    crashes: int = 0
    alarms: int = 0
    losses: int = 0

    @cached_property
    def keys(self) -> str:
        """Each ticket once."""
        return "".join(sorted(set(self.messages)))

    def begin(self) -> MemoState:
        """All messages are in the stream, and all consumers are registered."""
        return MemoState(
            0,
            (None,) * len(self.messages),
            (None,) * len(self.keys),
            None,
            (None,) * self.consumers,
            (),
            self.crashes,
            self.alarms,
            self.losses,
        )

    def _ticket(self, n: int) -> int:
        return self.keys.index(self.messages[n])

    def representative(self, s: MemoState) -> MemoState:
        """The state itself: there are few."""
        return s

    def steps(self, s: MemoState) -> Iterator[Step]:
        """The possible steps of the master, of each consumer, and of faults."""
        if s.master is None:
            yield from self._delegate_new(s)
            yield from self._recover_idle(s)
            if s.alarms:
                for c in range(self.consumers):
                    yield from self._move(s, c)
        else:
            yield from self._go_on(s, *s.master)
        for c, doing in enumerate(s.consumers):
            yield from self._consume(s, c, doing)

    def _delegate_new(self, s: MemoState) -> Iterator[Step]:
        if s.given < len(self.messages):
            n = s.given
            after = s._replace(given=n + 1, pending=_with(s.pending, n, MASTER), master=("read", n, 0))
            yield f"master: XREADGROUP gives {self._name(n)}", after

    def _go_on(self, s: MemoState, doing: str, n: int, consumer: int) -> Iterator[Step]:
        known = s.tickets[self._ticket(n)]
        if doing == "read":
            for c in (known[0],) if known else range(self.consumers):
                after = s._replace(pending=_with(s.pending, n, c), master=("claimed", n, c))
                yield f"master: XCLAIM {self._name(n)} for c{c}", after
        else:
            noted = self._note(s, n, consumer)._replace(master=None)
            yield f"master: notes that c{consumer} has {self._name(n)}", noted
        if s.crashes:
            yield "the master dies, and reloads its session", s._replace(master=None, crashes=s.crashes - 1)

    def _note(self, s: MemoState, n: int, consumer: int) -> MemoState:
        t = self._ticket(n)
        ids = s.tickets[t][1] if s.tickets[t] else ()  # type: ignore[index]
        return s._replace(tickets=_with(s.tickets, t, (consumer, tuple(sorted({*ids, n})))))

    def _recover_idle(self, s: MemoState) -> Iterator[Step]:
        noted = {n for ticket in s.tickets if ticket for n in ticket[1]}
        busy = {doing[1] for doing in s.consumers if doing}
        for n, owner in enumerate(s.pending):
            if owner is not None and n not in noted and n not in busy:
                known = s.tickets[self._ticket(n)]
                for c in (known[0],) if known else range(self.consumers):
                    after = self._note(s._replace(pending=_with(s.pending, n, c)), n, c)
                    yield f"master: XAUTOCLAIM finds {self._name(n)} idle, c{c} gets it", after

    def _move(self, s: MemoState, c: int) -> Iterator[Step]:
        """The health URL of a consumer does not answer: its tickets go to another. (In one step, a simplification.)"""
        after = s
        for t, ticket in enumerate(s.tickets):
            if ticket and ticket[0] == c:
                heir = (c + 1) % self.consumers
                for n in ticket[1]:
                    if after.pending[n] is not None:
                        after = after._replace(pending=_with(after.pending, n, heir))
                after = after._replace(tickets=_with(after.tickets, t, (heir, ticket[1])))
        if after is not s:
            yield f"master: c{c} does not answer, its tickets move", after._replace(alarms=s.alarms - 1)

    def _consume(self, s: MemoState, c: int, doing: tuple[str, int] | None) -> Iterator[Step]:
        def become(state: MemoState, now: tuple[str, int] | None) -> MemoState:
            return state._replace(consumers=_with(state.consumers, c, now))

        if doing is None:
            mine = [n for n, owner in enumerate(s.pending) if owner == c]
            if mine:
                yield f"c{c}: XREADGROUP 0 gives {self._name(mine[0])}, starts", become(s, ("runs", mine[0]))
            return
        what, n = doing
        if what == "runs":
            yield f"c{c}: has done {self._name(n)}", become(s._replace(applied=(*s.applied, n)), ("done", n))
        elif what == "done":
            yield f"c{c}: XACK {self._name(n)}", become(s._replace(pending=_with(s.pending, n, None)), ("acked", n))
        else:
            t = self._ticket(n)
            ticket, after = s.tickets[t], s
            if ticket:
                left = tuple(one for one in ticket[1] if one != n)
                after = s._replace(tickets=_with(s.tickets, t, (ticket[0], left) if left else None))
            yield f"c{c}: notifies the master of {self._name(n)}", become(after, None)
            if s.losses:
                yield (
                    f"c{c}: notifies the master of {self._name(n)}, and the call is lost",
                    become(s._replace(losses=s.losses - 1), None),
                )

    def _name(self, n: int) -> str:
        return f"{self.messages[n]}{n}"

    def wrong(self, s: MemoState) -> Iterator[str]:
        """See the names."""
        if len(set(s.applied)) < len(s.applied):
            yield "duplicate"
        for t in range(len(self.keys)):
            done = [n for n in s.applied if self._ticket(n) == t]
            if any(n > later for n, later in pairwise(done)):
                yield "inversion"
            if (
                sum(doing is not None and doing[0] == "runs" and self._ticket(doing[1]) == t for doing in s.consumers)
                > 1
            ):
                yield "overlap"

    def wrong_at_end(self, s: MemoState) -> Iterator[str]:
        """All must be done, and nothing left."""
        if set(s.applied) != set(range(len(self.messages))):
            yield "loss"
        if any(s.tickets):
            yield "leak"
