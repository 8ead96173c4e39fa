"""What a worker has in hand: taken from the group, not settled yet."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

from millstream.delivery.keyed_stream import KeyLease, lease_of
from millstream.delivery.reliable_stream import Delivery, LeasedKey
from millstream.handlers.attempt import DeadLettered, Done, Outcome
from millstream.worker.completion_queue import CompletionQueue
from millstream.worker.policy import WorkerPolicy

_PATIENCE_MS = 1_000.0
_TURN_MS = 50.0
_LONGEST_RUN = 16
_WEIGHT = 0.2


class InFlight:
    """Entries between being read and being settled. Shared by the threads of one reading loop.

    `buffer` are those that wait to be run, in order; `outbox` those that were run; `nudge` is called when some are put
    into the buffer; while `gate` is not set, none begins. How many are taken ahead follows the handler: more when it runs
    out of them, fewer when they wait for longer than a second, so that a slow worker does not hoard what others could do
    (as TCP finds its window). Of a handler with a key, `leases` are counted instead, as each line is run by one thread or
    task at a time. However many they are, they have no more bytes than `prefetch_bytes`, unless one alone has more.
    """

    def __init__(self, policy: WorkerPolicy, at_once: int) -> None:
        self.buffer: SimpleQueue[Delivery | None] = SimpleQueue()
        self.outbox = CompletionQueue(policy.batch)
        self.freed = threading.Event()
        self.nudge: Callable[[], None] = lambda: None
        self.gate = threading.Event()
        self.gate.set()
        self._is_closed = False
        self.leases: set[KeyLease] = set()
        self._held: dict[tuple[str, bytes], Delivery] = {}
        self._run_ms = 0.0
        self._lock = threading.Lock()
        self._most = policy.prefetch
        self._most_bytes = policy.prefetch_bytes
        self._bytes = 0
        self.unfit = 0
        """How large the entry is that is next, and had no room; 0 if there is none."""
        self._least = min(2 * at_once, policy.prefetch)
        self._limit = self._least
        self._backlog = False

    def __contains__(self, delivery: Delivery) -> bool:
        return self._held.get(delivery.place) is delivery

    def __len__(self) -> int:
        return len(self._held)

    def gone(self, deliveries: Iterable[Delivery]) -> set[Delivery]:
        """Those that are not in hand any more."""
        held = self._held
        return {one for one in deliveries if held.get(one.place) is not one}

    @property
    def deliveries(self) -> list[Delivery]:
        """All of them, oldest first."""
        return list(self._held.values())

    def ids(self, stream: str) -> set[bytes]:
        """The ids of one stream's."""
        return {entry_id for name, entry_id in list(self._held) if name == stream}

    def room(self) -> int:
        """How many more may be taken now; 0 as well if so few that reading them is not worth it yet."""
        starved = self.buffer.empty()
        if starved and self._backlog:
            self._limit = min(2 * self._limit, self._most)
        if self.at_budget:
            return 0
        room = self._room()
        return room if starved or self._is_worth_it(room) else 0

    @property
    def bytes(self) -> int:
        """How many bytes all of them have."""
        return self._bytes

    @property
    def room_bytes(self) -> int:
        """How many more bytes may be taken now. Where nothing is in hand, one entry may have more than that."""
        return max(0, self._most_bytes - self._bytes)

    @property
    def is_empty(self) -> bool:
        """True if nothing is in hand."""
        return not self._held

    @property
    def at_budget(self) -> bool:
        """True if nothing more may be taken now for the bytes that it would have. Others do not go before what is large."""
        room = self.room_bytes
        return not self.is_empty and (not room or room < self.unfit)

    def _is_worth_it(self, room: int) -> bool:
        return 2 * room >= self._limit and 2 * self.room_bytes >= self._most_bytes

    def _room(self) -> int:
        return self._limit - (len(self.leases) or len(self._held))

    def found(self, count: int, asked: int) -> None:
        """Note that a read gave `count` of at most `asked` entries."""
        self._backlog = count >= asked

    def take(self, deliveries: Sequence[Delivery], now_ms: float) -> None:
        """Put entries into the buffer, where they wait from now on."""
        for delivery in deliveries:
            delivery.since_ms = now_ms
        with self._lock:
            self._hold(deliveries)
        for delivery in deliveries:
            self.buffer.put(delivery)
        self.nudge()

    def _hold(self, deliveries: Iterable[Delivery]) -> None:
        held = self._held
        for delivery in deliveries:
            known = held.get(delivery.place)
            held[delivery.place] = delivery
            self._bytes += delivery.size - (0 if known is None else known.size)

    def _let_go(self, deliveries: Iterable[Delivery]) -> None:
        held = self._held
        for delivery in deliveries:
            # The same entry may have come to this worker once more since.
            if held.get(delivery.place) is delivery:
                del held[delivery.place]
                self._bytes -= delivery.size

    def keep(self, delivery: Delivery) -> None:
        """Hold an entry that does not go through the buffer."""
        with self._lock:
            self._hold((delivery,))
        if delivery.lease is not None:
            self.leases.add(lease_of(delivery))

    # Lines

    @property
    def run_length(self) -> int:
        """How many entries of a line are worth a turn: what takes about 50 ms, so that lines take turns quickly."""
        return _LONGEST_RUN if self._run_ms <= 0 else max(1, min(_LONGEST_RUN, int(_TURN_MS / self._run_ms)))

    def took(self, run_ms: float) -> None:
        """Note how long a run of the handler has taken."""
        self._run_ms += _WEIGHT * (run_ms - self._run_ms)

    def take_leases(self, leases: Iterable[KeyLease], now_ms: float) -> None:
        """Put the first entry of each line into the buffer, and hold the others for whoever runs it."""
        for lease in leases:
            for delivery in lease.waiting:
                delivery.since_ms = now_ms
            with self._lock:  # it is in hand whole, or not at all
                self.leases.add(lease)
                self._hold(lease.waiting)
            self.buffer.put(lease.waiting.popleft())
        self.nudge()

    def conclude(self, delivery: Delivery, outcome: Outcome) -> Delivery | None:
        """Put what became of an entry into the outbox; return the next of its line, to be run at once by the same runner.

        While there is more for the runners to do, nobody waits for its being settled.
        """
        following = None if delivery.lease is None else self._following(delivery.lease, delivery, outcome)
        self.outbox.put(((delivery,), outcome), urgent=following is None and self.buffer.empty())
        return following

    def _following(self, turn: LeasedKey, delivery: Delivery, outcome: Outcome) -> Delivery | None:
        if isinstance(outcome, Done):
            turn.state = outcome.state
        while turn.waiting and isinstance(outcome, (Done, DeadLettered)) and not turn.lost:
            following = turn.waiting.popleft()
            if following in self:
                return following
        turn.last = delivery
        return None

    def drop_surplus(self) -> list[KeyLease]:
        """Let go of lines that have not begun, of those that are more than would be taken now; return them."""
        given_back: list[KeyLease] = []
        if len(self.leases) <= self._limit:
            return given_back
        with self._lock:
            for lease in self.leases.copy():
                if len(self.leases) <= self._limit:
                    break
                head = next(iter(lease.entries), None)
                if head is None or head.running or head not in self:
                    continue
                self._let_go((head,))
                if head.running:  # it began this moment, or was about to
                    self._hold((head,))
                else:
                    self.leases.discard(lease)
                    given_back.append(lease)
        for lease in given_back:
            self.end_lease(lease)
        return given_back

    def end_lease(self, lease: KeyLease) -> list[Delivery]:
        """Let go of a line; return what was left of it in hand."""
        rest = [one for one in lease.entries if one in self]
        self.leases.discard(lease)
        self.drop(rest)
        return rest

    # What begins says so before it looks whether it may, and who gives things up, or closes the gate, looks whether they
    # have begun afterwards: so one of the two sees the other. A lock would have the runner wait for the settler.

    def begin(self, delivery: Delivery, now_ms: float, *, anyway: bool = False) -> bool | None:
        """Have an entry run from now on; False if it is not in hand any more, or its lease is over: it must not be run.

        None if it has to wait until the gate is open, but not if it shall begin `anyway`.
        """
        since_ms, delivery.since_ms, delivery.ran, delivery.running = delivery.since_ms, now_ms, False, True
        lease = delivery.lease
        if lease is not None and lease.until_ms <= now_ms:
            lease.lost = True  # nobody will run it here any more: it must not be extended
        if self._held.get(delivery.place) is not delivery or (lease is not None and lease.lost):
            delivery.running = False
            return False
        if self._is_closed and not anyway:
            delivery.running, delivery.since_ms = False, since_ms
            return None
        if now_ms - since_ms > _PATIENCE_MS:
            self._limit = max(self._limit // 2, self._least)
        return True

    def begin_all(self, deliveries: Sequence[Delivery], now_ms: float) -> list[Delivery] | None:
        """Have entries run together from now on, those that are still in hand. None if they have to wait for the gate."""
        for one in deliveries:
            one.ran, one.running = False, True
        if self._is_closed:
            for one in deliveries:
                one.running = False
            return None
        return [one for one in deliveries if self.begin(one, now_ms, anyway=True)]

    def close_gate(self) -> None:
        """Let nothing more begin until the gate is opened."""
        self._is_closed = True
        self.gate.clear()

    def open_gate(self) -> None:
        """Let things begin again."""
        self._is_closed = False
        self.gate.set()

    def drop(self, deliveries: Iterable[Delivery]) -> None:
        """Let go of entries that are settled, or lost to another worker."""
        with self._lock:
            self._let_go(deliveries)
        if self.buffer.empty() or self._is_worth_it(self._room()):  # whoever reads need not be woken for less
            self.freed.set()

    def drop_waiting(self) -> list[Delivery]:
        """Let go of all that has not begun, which nothing will then run any more; return it."""
        waiting: list[Delivery] = []
        with self._lock:
            for delivery in self.deliveries:
                if not delivery.running and delivery in self:
                    self._let_go((delivery,))
                    if delivery.running:  # it began this moment, or was about to: it stays until the stop is over
                        self._hold((delivery,))
                    else:
                        waiting.append(delivery)
        with contextlib.suppress(Empty):
            while True:
                self.buffer.get_nowait()
        return waiting
