"""Breaker window: decides from the outcomes of a handler whether its breaker opens. No I/O."""

from collections import Counter, deque
from collections.abc import Mapping

import msgspec

from millstream.handlers.attempt import KEY_FUNCTION, DeadLettered
from millstream.model import Breaker
from millstream.redis_client.redaction import redact_text

_ERROR_CHARS = 300


class Trip(msgspec.Struct, frozen=True):
    """Why a breaker opens: `count` of the last `of` messages became dead letters for `cause`; `error`: one of theirs."""

    cause: str
    count: int
    of: int
    error: str


def cause_of(dead: DeadLettered) -> str | None:
    """Return the cause of a dead letter that a broken deployment may explain; else None.

    None if the handler raised Reject, if an operator skipped the message, if an earlier one of its key canceled it, or if
    the message crashed its process: then the message alone is the cause.
    """
    if dead.reason in ("rejected", "crashed", "skipped", "canceled"):
        return None
    return _plain(f"{dead.reason} ({dead.place})" if dead.place else dead.reason)


def example_of(dead: DeadLettered) -> str:
    """Return the error of a dead letter, short, without passwords in URLs, and as valid text."""
    return _plain(redact_text(dead.error)[:_ERROR_CHARS])


def _plain(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def is_keyless(dead: DeadLettered) -> bool:
    """Return whether a message is dead because it has no key. Engines count these where they read the keys."""
    return dead.reason == "missing-key" or dead.place == KEY_FUNCTION


class BreakerWindow:
    """The last outcomes of one process, or of one run, since it started or the handler was resumed. For one thread at a time."""

    def __init__(self, policy: Breaker) -> None:
        self._policy = policy
        self._total = 0
        self._dead: deque[tuple[int, str]] = deque()
        self._counts: Counter[str] = Counter()

    def on_processed(self, count: int = 1) -> None:
        """Note messages that were processed, or that the handler rejected."""
        self._total += count

    def on_dead(self, cause: str, error: str) -> Trip | None:
        """Note a dead letter; return why the breaker opens, if it does now."""
        policy = self._policy
        self._total += 1
        self._dead.append((self._total, cause))
        self._counts[cause] += 1
        while self._dead[0][0] <= self._total - policy.window:
            self._counts[self._dead.popleft()[1]] -= 1
        count, seen = self._counts[cause], min(self._total, policy.window)
        opens = count == self._total >= policy.first or (
            self._total >= policy.window and count >= policy.share * policy.window
        )
        return Trip(cause, count, seen, error) if opens else None

    def on_mixed(self, processed: int, dead: Mapping[str, tuple[int, str]]) -> Trip | None:
        """Note outcomes whose order is unknown, as if they were mixed evenly. `dead`: count and error of each cause."""
        total = processed + sum(count for count, _ in dead.values())
        # A window of the same mixture decides as a longer list of outcomes would, at a bounded cost.
        scale = min(1.0, self._policy.window / max(1, total))
        counts: dict[str, int] = {"": round(processed * scale)}
        counts |= {cause: round(count * scale) for cause, (count, _) in dead.items()}
        due = dict.fromkeys(counts, 0.0)
        trip = None
        for _ in range(steps := sum(counts.values())):
            due = {cause: credit + counts[cause] / steps for cause, credit in due.items()}
            cause = max(due, key=due.__getitem__)
            due[cause] -= 1
            if cause:
                trip = self.on_dead(cause, dead[cause][1]) or trip
            else:
                self.on_processed()
        return trip
