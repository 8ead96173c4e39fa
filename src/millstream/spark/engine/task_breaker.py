"""TaskBreaker: makes a task stop early when nearly all of its messages become dead letters for the same cause."""

from collections.abc import Sequence

import msgspec

from millstream.handlers.attempt import DeadLettered
from millstream.handlers.breaker_window import BreakerWindow, Trip, cause_of, example_of, is_keyless
from millstream.model import Breaker

Causes = dict[str, tuple[int, str]]
"""Of each cause of dead letters: how many there were, and the error of one."""


class TaskBreaker:
    """Counts the outcomes of one task. Once it `is_open`, the task runs nothing more and writes no more dead letters.

    `trip`: why it opened; `causes`: of the dead letters so far.
    """

    def __init__(self, policy: Breaker | None) -> None:
        self._window = None if policy is None else BreakerWindow(policy)
        self._keyless = None if policy is None else BreakerWindow(policy)
        self.trip: Trip | None = None
        self.causes: Causes = {}

    @property
    def is_open(self) -> bool:
        """True if the task must stop."""
        return self.trip is not None

    def on_processed(self, count: int = 1) -> None:
        """Note that messages were processed."""
        if self._window is not None:
            self._window.on_processed(count)

    def admits(self, dead: DeadLettered, *, redriven: bool) -> bool:
        """Return whether a dead letter may be written; if not, its message must stay uncommitted."""
        cause = cause_of(dead)
        if self._window is None or cause is None or redriven:  # a redriven message failed before, too
            if dead.reason == "rejected":
                self.on_processed()
            return True
        if self.is_open:
            return False
        if is_keyless(dead):  # `on_keyless` has counted it
            return True
        error = example_of(dead)
        count, example = self.causes.get(cause, (0, error))
        self.causes[cause] = count + 1, example
        self.trip = self._window.on_dead(cause, error)
        return True

    def on_keyless(self, dead: Sequence[DeadLettered], *, of: int) -> None:
        """Note, before any of them is run, which of so many messages have no key. May open the breaker.

        Later a corrected handler would not find that they were done: it keeps their progress by their keys. And the
        messages without a key come first in a task, though they may be few.
        """
        if self._keyless is None or not dead:
            return
        found: Causes = {}
        for one in dead:
            cause, error = cause_of(one) or "", example_of(one)
            found[cause] = found.get(cause, (0, error))[0] + 1, error
        self.trip = self._keyless.on_mixed(of - len(dead), found)
        if self.is_open:
            self.causes |= found

    def report(self) -> dict[str, str]:
        """Return the trip and the causes, as text for the driver."""
        trip = "" if self.trip is None else msgspec.json.encode(self.trip).decode()
        return {"causes": msgspec.json.encode(self.causes).decode(), "trip": trip}
