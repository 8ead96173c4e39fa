"""UnchangedStreams: streams that a planner may skip: they had no entry to read, and have not changed since. No I/O."""

from collections.abc import Iterable

from millstream.spark.source.offsets import Offsets
from millstream.spark.source.subscription import SubscribedStreams


class UnchangedStreams:
    """The streams that the planner has to check: all, until a plan finds nothing to do for them.

    That finding holds for an offset, the stream info and a subscription. So one of a plan from `start` holds for the
    next plan from the same offsets, or from the end of that plan, which differs only in streams that had something to
    do. Offsets and subscriptions are the same if their versions are.
    """

    def __init__(self) -> None:
        self._changed: dict[str, None] = {}
        self._all_changed = True
        self._valid_for: tuple[int, ...] = ()
        self._subscribed: int | None = None

    def add_changed(self, changed: Iterable[str] | None) -> None:
        """Add streams that have changed; None: all may have."""
        if changed is None:
            self._all_changed = True
        else:
            self._changed.update(dict.fromkeys(changed))

    def to_check(self, start: Offsets, subscribed: SubscribedStreams) -> list[str]:
        """The streams to check among those of `start` and `subscribed`."""
        is_known = subscribed.version == self._subscribed and start.version in self._valid_for
        if self._all_changed or not is_known:
            self._changed = dict.fromkeys((*start.positions, *subscribed.names))
            self._all_changed, self._valid_for, self._subscribed = False, (start.version,), subscribed.version
        return list(self._changed)

    def mark_idle(self, at_rest: Iterable[str], start: Offsets, end: Offsets) -> None:
        """Record that a plan from `start` to `end` found nothing to do for the streams `at_rest`."""
        for name in at_rest:
            del self._changed[name]
        self._valid_for = (start.version, end.version)
