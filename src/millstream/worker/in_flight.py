"""In-flight entries of a worker: fetched from the group or leased, and not committed yet."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

from millstream.clock import Clock
from millstream.delivery.keyed_stream import KeyLease, lease_of
from millstream.delivery.reliable_stream import Delivery, LeasedKey
from millstream.handlers.attempt import DeadLettered, Done, Outcome
from millstream.worker.completion_queue import CompletionQueue
from millstream.worker.policy import WorkerPolicy

_LONG_WAIT_MS = 1_000.0
_SLICE_MS = 50.0
_USUAL_SLICE, _LONGEST_SLICE, _LONG_SLICE_MS = 16, 64, 16.0
_WEIGHT = 0.2
DELAY_THREAD = "millstream-delay"
"""Name of a thread that adds entries to the buffer after a delay."""


class InFlight:
    """Entries between fetch and commit. Shared by the threads of one reading loop.

    `buffer` holds the entries that wait to be run, in order, and `completions` those that were run. `on_buffered` is
    called when entries are added to the buffer. While `gate` is not set, no entry starts.

    The number of prefetched entries follows the handler: it doubles when the runners run out of entries, and halves
    when entries wait for longer than a second, so that a slow worker keeps no entries that others could process (as TCP
    adapts its window). For a handler with a key, `leases` are counted instead, as one thread or task at a time
    runs each key; with a `list_size`, so many entries of a key may run as one list. The bytes in flight never exceed
    `prefetch_bytes`, unless a single entry does; a suspect that waits, for its back-off or to know how a process ended,
    does not count, so that others go on meanwhile.
    """

    def __init__(self, policy: WorkerPolicy, concurrency: int, *, list_size: int = 0) -> None:
        self.buffer: SimpleQueue[Delivery | None] = SimpleQueue()
        self.completions = CompletionQueue(policy.batch)
        self.room_freed = threading.Event()
        self.on_buffered: Callable[[], None] = lambda: None
        self.gate = threading.Event()
        self.gate.set()
        self.is_gate_closed = False
        """The opposite of `gate`, for runners: a look at it costs less."""
        self._is_stopping = False
        self._delays: list[threading.Timer] = []
        self.leases: set[KeyLease] = set()
        self.given_up: set[KeyLease] = set()
        """Leases of runs that were given up: see `give_up`."""
        self.logged: set[Delivery] = set()
        """Entries of runs that were given up, whose failed attempts are logged: how these runs end later is not."""
        self.returned: SimpleQueue[tuple[str, int]] = SimpleQueue()
        """How many entries of a stream went back to their key queues before they had begun: they are leased again."""
        self._by_ref: dict[tuple[str, bytes], Delivery] = {}
        self._dropped: set[Delivery] = set()
        self._suspects: set[Delivery] = set()
        self._waiting_suspects: set[Delivery] = set()
        self._waiting_bytes = 0
        self._run_ms = 0.0
        self._lock = threading.Lock()
        self._max_count = policy.prefetch
        self._max_bytes = policy.prefetch_bytes
        self._bytes = 0
        self.oversized_bytes = 0
        """Size in bytes of the next entry, if it did not fit; 0 otherwise."""
        self._list_size = list_size
        self._min_limit = min(2 * concurrency, policy.prefetch)
        self._limit = self._min_limit
        self._has_backlog = False

    def __contains__(self, delivery: Delivery) -> bool:
        return self._by_ref.get(delivery.entry_ref) is delivery

    def __len__(self) -> int:
        return len(self._by_ref)

    def not_in_flight(self, deliveries: Iterable[Delivery]) -> set[Delivery]:
        """Return those of `deliveries` that are no longer in flight."""
        by_ref = self._by_ref
        return {one for one in deliveries if by_ref.get(one.entry_ref) is not one}

    @property
    def deliveries(self) -> list[Delivery]:
        """All entries in flight, oldest first."""
        return list(self._by_ref.values())

    @property
    def runs(self) -> list[Delivery]:
        """Entries whose runs have not ended; also of those that were lost or skipped meanwhile and are not in flight."""
        with self._lock:
            self._dropped = {one for one in self._dropped if one.running and not one.finished}
            return [one for one in self._by_ref.values() if one.running and not one.finished] + [*self._dropped]

    def entry_ids(self, stream: str) -> set[bytes]:
        """Return the ids in flight of one stream."""
        return {entry_id for name, entry_id in list(self._by_ref) if name == stream}

    def stop_fetching(self) -> None:
        """Have no free slots from now on: the room of entries that a stop releases stays free. End the delays, too."""
        with self._lock:
            self._is_stopping = True
            delays, self._delays = self._delays, []
        for one in delays:
            one.cancel()
        self.room_freed.set()

    def free_slots(self) -> int:
        """Return how many more entries may be fetched now; 0 if there is room for too few to be worth a read.

        0 while the gate is closed, and during a stop: other workers would have to wait for entries that cannot start
        here.
        """
        if self.buffer.empty() and self._has_backlog and not (self.is_gate_closed or self._is_stopping):
            self._limit = min(2 * self._limit, self._max_count)
        return self.room

    @property
    def room(self) -> int:
        """As `free_slots`, but the limit stays, also if the runners have run out of entries."""
        if self.is_gate_closed or self._is_stopping or self.at_budget:
            return 0
        room = self._free_slots()
        return room if self.buffer.empty() or self._is_worth_it(room) else 0

    @property
    def bytes(self) -> int:
        """Bytes of names and values in flight."""
        return self._bytes

    @property
    def free_bytes(self) -> int:
        """How many more bytes may be fetched now. With nothing in flight, one entry may exceed that."""
        # Suspects that wait are few, one for each process that died. Were they many, they would have as much room again.
        counted = self._bytes - min(self._waiting_bytes, self._max_bytes)
        return max(0, self._max_bytes - counted)

    @property
    def is_empty(self) -> bool:
        """True if nothing is in flight but suspects that wait."""
        return len(self._by_ref) <= len(self._waiting_suspects)

    @property
    def at_budget(self) -> bool:
        """True if the byte budget allows no fetch now. Smaller entries do not overtake a large one that waits."""
        room = self.free_bytes
        return not self.is_empty and (not room or room < self.oversized_bytes)

    def _is_worth_it(self, room: int) -> bool:
        return 2 * room >= self._limit and 2 * self.free_bytes >= self._max_bytes

    def _free_slots(self) -> int:
        return self._limit - (len(self.leases) or len(self._by_ref)) + len(self._waiting_suspects)

    def on_fetched(self, count: int, requested: int) -> None:
        """Note that a fetch returned `count` entries of at most `requested`."""
        self._has_backlog = count >= requested

    def add(self, deliveries: Sequence[Delivery], now_ms: float) -> None:
        """Add entries to the buffer, where they wait from now on."""
        for delivery in deliveries:
            delivery.state_since_ms = now_ms
        with self._lock:
            self._add(deliveries)
        for delivery in deliveries:
            self.buffer.put(delivery)
        self.on_buffered()

    def add_later(self, deliveries: Sequence[Delivery], delay_ms: float, clock: Clock) -> None:
        """Add entries to flight now, and to the buffer in `delay_ms` milliseconds, unless they are removed meanwhile."""
        if delay_ms <= 0:
            self.add(deliveries, clock.monotonic_ms())
            return
        now_ms = clock.monotonic_ms()
        for delivery in deliveries:
            delivery.state_since_ms, delivery.due_ms = now_ms, now_ms + delay_ms
        timer = threading.Timer(delay_ms / 1000, lambda: self.buffer_again(deliveries, clock.monotonic_ms()))
        timer.name, timer.daemon = DELAY_THREAD, True
        with self._lock:
            self._add(deliveries)
            if not self._is_stopping:
                timer.start()
                self._delays = [one for one in self._delays if one.is_alive()] + [timer]

    def buffer_again(self, deliveries: Iterable[Delivery], now_ms: float) -> None:
        """Add those entries to the buffer that are still in flight."""
        with self._lock:  # one that another thread removes now must not come back
            kept = [one for one in deliveries if one in self]
            for delivery in kept:
                delivery.state_since_ms = now_ms
        for delivery in kept:
            self.buffer.put(delivery)
        self.on_buffered()

    def _add(self, deliveries: Iterable[Delivery]) -> None:
        by_ref = self._by_ref
        for delivery in deliveries:
            known = by_ref.get(delivery.entry_ref)
            if known is not None and known is not delivery:
                self._forget_suspect(known)
            by_ref[delivery.entry_ref] = delivery
            if self._dropped:
                self._dropped.discard(delivery)
            self._bytes += delivery.size if known is None else delivery.size - known.size

    def _remove(self, deliveries: Iterable[Delivery]) -> None:
        by_ref, suspects = self._by_ref, self._suspects
        for delivery in deliveries:
            # The same entry may have been delivered to this worker again since.
            ref = delivery.entry_ref
            if by_ref.get(ref) is delivery:
                del by_ref[ref]
                if suspects:
                    self._forget_suspect(delivery)
                self._bytes -= delivery.size
                if not delivery.finished and delivery.running:
                    self._dropped.add(delivery)

    def _forget_suspect(self, delivery: Delivery) -> None:
        if delivery in self._suspects:
            self._suspects.discard(delivery)
            self._set_waiting(delivery, waits=False)

    def _set_waiting(self, delivery: Delivery, *, waits: bool) -> None:
        if waits and delivery in self._suspects:
            self._waiting_suspects.add(delivery)
        else:
            self._waiting_suspects.discard(delivery)
        self._waiting_bytes = sum(one.size for one in self._waiting_suspects)

    def set_suspect_waiting(self, delivery: Delivery, *, waits: bool) -> None:
        """Note that a suspect waits before it is run, or does so no longer. While it waits, its room is for others."""
        with self._lock:
            self._set_waiting(delivery, waits=waits)
        if waits:
            self.room_freed.set()

    def add_suspect(self, delivery: Delivery) -> None:
        """Add an entry that bypasses the buffer, as it runs in isolation."""
        with self._lock:
            self._add((delivery,))
            self._suspects.add(delivery)
        if delivery.lease is not None:
            self.leases.add(lease_of(delivery))

    # Key queues

    @property
    def slice_length(self) -> int:
        """How many entries of a key to lease at once: 16, or fewer, with about 50 ms of work, so that the keys share the
        worker fairly; more, up to 64, with 16 ms of work, as a lease and its commit cost Redis as much as several messages.

        With lists, as many as fill one.
        """
        if self._list_size or self._run_ms <= 0:
            return self._list_size or _USUAL_SLICE
        quick = max(_USUAL_SLICE, min(_LONGEST_SLICE, int(_LONG_SLICE_MS / self._run_ms)))
        return max(1, min(quick, int(_SLICE_MS / self._run_ms)))

    def on_run_time(self, run_ms: float) -> None:
        """Note how long a run of the handler took."""
        self._run_ms += _WEIGHT * (run_ms - self._run_ms)

    def add_leases(self, leases: Iterable[KeyLease], now_ms: float) -> None:
        """Put the first entry of each leased key into the buffer, and hold the others for the runner of the first."""
        for lease in leases:
            for delivery in lease.queued:
                delivery.state_since_ms = now_ms
            with self._lock:  # a lease is in flight as a whole, or not at all
                self.leases.add(lease)
                self._add(lease.queued)
            self.buffer.put(lease.queued.popleft())
        self.on_buffered()

    def complete(self, delivery: Delivery, outcome: Outcome) -> Delivery | None:
        """Queue the outcome of an entry for the committer; return the key's next entry, for the same runner to run.

        Not urgent while the runners still have work: its commit can wait for a larger batch.
        """
        if delivery.lease is None:
            self.completions.put(((delivery,), outcome), urgent=self.buffer.empty())
            return None
        following = self._next_of_key(delivery.lease, delivery, outcome)
        self.completions.put(((delivery,), outcome), urgent=following is None and self.buffer.empty())
        return following

    def complete_list(self, deliveries: Sequence[Delivery], outcome: Outcome) -> Delivery | None:
        """Do as `complete` for entries of one key that were run as a list, and are committed together."""
        following = self._next_of_key(lease_of(deliveries[0]), deliveries[-1], outcome)
        self.completions.put((deliveries, outcome), urgent=following is None and self.buffer.empty())
        return following

    def put_back(self, deliveries: Sequence[Delivery], now_ms: float) -> None:
        """Return started entries of a key, the last ones that have begun, to those of their lease that have not."""
        with self._lock:  # a thread that removes entries must not remove some of them, and leave later ones
            for delivery in reversed(deliveries):
                # As of a run that is over: the lease watchdog may wait for its end.
                delivery.finished, delivery.running, delivery.in_batch = True, False, False
                delivery.state_since_ms = now_ms
                lease_of(delivery).queued.appendleft(delivery)

    def _next_of_key(self, leased_key: LeasedKey, delivery: Delivery, outcome: Outcome) -> Delivery | None:
        if isinstance(outcome, Done):
            leased_key.state = outcome.state
        queued = leased_key.queued if isinstance(outcome, (Done, DeadLettered)) else ()
        while queued and not leased_key.expired:
            following = queued.popleft()
            if self._by_ref.get(following.entry_ref) is following:
                return following
        leased_key.last_run = delivery
        return None

    def remove_surplus(self) -> list[KeyLease]:
        """Remove leased keys that have not started, as far as they exceed the prefetch limit; return their leases.

        While the gate is closed all of them do, except suspects: here they could not start before it is opened.
        """
        surplus: list[KeyLease] = []
        limit = len(self._waiting_suspects) + (0 if self.is_gate_closed else self._limit)
        if len(self.leases) <= limit:
            return surplus
        with self._lock:
            for lease in self.leases.copy():
                if len(self.leases) <= limit:
                    break
                head = next(iter(lease.entries), None)
                if head is None or head.running or head not in self or head in self._suspects:
                    continue
                self._remove((head,))
                if head.running:  # it started at this moment, or is about to
                    self._add((head,))
                else:
                    self._end_lease(lease)
                    surplus.append(lease)
        for lease in surplus:
            self.remove_lease(lease)
        return surplus

    def idle_leases(self, leases: Iterable[KeyLease]) -> list[KeyLease]:
        """Return those of `leases` that are in flight though none of their entries is any more."""
        held = [lease for lease in leases if lease in self.leases]
        if not held:
            return held
        with self._lock:  # a thread that removes entries adds those again that it finds running
            return [lease for lease in held if not any(one in self for one in lease.entries)]

    def remove_lease(self, lease: KeyLease) -> list[Delivery]:
        """Remove a leased key; return its entries that were still in flight."""
        rest = [one for one in lease.entries if one in self] if lease.in_flight_count else []
        self._end_lease(lease)
        self.remove(rest)
        return rest

    def give_up(self, lease: KeyLease) -> None:
        """Remove a leased key whose run goes on beyond its time limit; its lease stays known, as `given_up`.

        It is neither renewed nor released: no other worker may run the key before this process has ended.
        """
        self.given_up.add(lease)  # first: the lease watchdog must find it in one of the two at any time
        self.remove_lease(lease)

    def leases_of_runs(self) -> set[KeyLease]:
        """Return the leases in flight, and those of all runs that have not ended, whatever became of their entries."""
        return {*self.leases.copy(), *(lease_of(one) for one in self.runs if one.lease is not None)}

    def _end_lease(self, lease: KeyLease) -> None:
        self.leases.discard(lease)
        self.note_returned(lease)

    def note_returned(self, lease: KeyLease) -> None:
        """Count those entries of a lease that have not begun as returned to their queue, once; before it is released.

        Those that had failed or waited before the lease do not count.
        """
        if not lease.returned:
            lease.returned = True
            head = lease.entries[:1]  # it is in the buffer until it begins
            unstarted = {*lease.queued, *(one for one in head if not (one.running or one.finished))}
            if count := sum(not one.may_have_crash_counts for one in unstarted):
                self.returned.put((lease.stream.stream, count))

    # A runner first marks an entry as running, then checks whether it may start. A thread that removes entries or
    # closes the gate acts first, then checks for running entries. So at least one of the two sees the other. A lock
    # would make the runner wait for the committer.

    def start(self, delivery: Delivery, now_ms: float, *, ignore_gate: bool = False) -> bool | None:
        """Mark an entry as running; False if it must not run, as it is no longer in flight or its lease has ended.

        None if it has to wait until the gate is open; `ignore_gate` starts it all the same.
        """
        since_ms, was_finished = delivery.state_since_ms, delivery.finished
        # The time first: another thread must not take the wait for a part of the run.
        delivery.state_since_ms, delivery.finished, delivery.running = now_ms, False, True
        lease = delivery.lease
        if lease is not None and lease.expires_ms <= now_ms:
            lease.expired = True  # this worker runs no more of it: the lease must not be renewed
        if self._by_ref.get(delivery.entry_ref) is not delivery or (lease is not None and lease.expired):
            # A run before this one has ended, and the lease watchdog may wait for that.
            delivery.finished, delivery.running = was_finished, False
            return False
        if self.is_gate_closed and not ignore_gate:
            delivery.running, delivery.state_since_ms = False, since_ms
            return None
        if now_ms - since_ms > _LONG_WAIT_MS:
            self._fetch_fewer()
        return True

    def start_list(self, first: Delivery, most: int, now_ms: float) -> list[Delivery] | None:
        """Mark the entries of a key that run together as running: up to `most`, the first and those after it.

        Return them: [] if the first must not run, None if it has to wait until the gate is open.
        """
        starts = self.start(first, now_ms)
        if not starts:
            return None if starts is None else []
        started, queued = [first], lease_of(first).queued
        while queued and len(started) < most:
            queued[0].state_since_ms = now_ms  # it has waited as long as the first, which counts once
            if not self.start(queued[0], now_ms, ignore_gate=True):
                break
            started.append(queued.popleft())
        for one in started:
            one.in_batch = len(started) > 1
        return started

    def start_all(self, deliveries: Sequence[Delivery], now_ms: float) -> list[Delivery] | None:
        """Mark entries that run together as running; return those still in flight, or None if the gate is closed."""
        since_ms = [one.state_since_ms for one in deliveries]
        for one in deliveries:  # the time first: another thread must not take the wait for a part of the run
            one.state_since_ms, one.finished, one.running = now_ms, False, True
        if self.is_gate_closed:
            for one, began_ms in zip(deliveries, since_ms, strict=True):
                one.running, one.state_since_ms = False, began_ms
            return None
        if now_ms - min(since_ms, default=now_ms) > _LONG_WAIT_MS:
            self._fetch_fewer()
        return [one for one in deliveries if self.start(one, now_ms, ignore_gate=True)]

    def _fetch_fewer(self) -> None:
        """Fetch fewer entries: one has waited for long."""
        self._limit = max(self._limit // 2, self._min_limit)

    def close_gate(self) -> None:
        """Let no entry start until the gate is opened."""
        self.is_gate_closed = True
        self.gate.clear()

    def open_gate(self) -> None:
        """Let entries start again."""
        self.is_gate_closed = False
        self.gate.set()
        self.room_freed.set()

    def remove(self, deliveries: Iterable[Delivery]) -> None:
        """Remove entries that are committed, or lost to another worker."""
        with self._lock:
            self._remove(deliveries)
        if self.buffer.empty() or self._is_worth_it(self._free_slots()):  # waking the fetcher for less is not worth it
            self.room_freed.set()

    def remove_waiting(self) -> list[Delivery]:
        """Remove all entries that have not started, so that nothing runs them any more; return them."""
        waiting = self.remove_unstarted()
        with contextlib.suppress(Empty):
            while True:
                self.buffer.get_nowait()
        return waiting

    def remove_unstarted(self, *, but_suspects: bool = False) -> list[Delivery]:
        """As `remove_waiting`, while entries may still be added: leaves the buffer to the runners, which skip them.

        `but_suspects` leaves the suspects in flight.
        """
        waiting: list[Delivery] = []
        with self._lock:
            for delivery in self.deliveries:
                if but_suspects and delivery in self._suspects:
                    continue
                if not delivery.running and delivery in self:
                    self._remove((delivery,))
                    if delivery.running:  # it started at this moment, or is about to: it stays until the stop is over
                        self._add((delivery,))
                    else:
                        waiting.append(delivery)
        return waiting
