"""UnchangedStreams: spares the planner streams that had nothing to do and have not changed since. No I/O."""

from collections.abc import Collection, Iterable, KeysView

from millstream.spark.source.offsets import Offsets


class UnchangedStreams:
    """The streams that the planner has to check: all, until a plan finds nothing to do for them.

    That finding holds for an offset, the stream info and a subscription. So one of a plan from `start` holds for the
    next plan from the same offsets, or from the end of that plan, which differs only in streams that had something to
    do.
    """

    def __init__(self) -> None:
        self._changed: dict[str, None] = {}
        self._all_changed = True
        self._valid_for: tuple[Offsets, ...] = ()
        self._subscribed: Collection[str] | None = None

    def add_changed(self, changed: Iterable[str] | None) -> None:
        """Add streams that have changed; None: all may have."""
        if changed is None:
            self._all_changed = True
        else:
            self._changed.update(dict.fromkeys(changed))

    def to_check(self, start: Offsets, subscribed: KeysView[str]) -> list[str]:
        """The streams to check among those of `start` and `subscribed`."""
        known = subscribed is self._subscribed and any(start is place for place in self._valid_for)
        if self._all_changed or not known:
            self._changed = dict.fromkeys((*start, *subscribed))
            self._all_changed, self._valid_for, self._subscribed = False, (start,), subscribed
        return list(self._changed)

    def mark_idle(self, at_rest: Iterable[str], start: Offsets, ends: Offsets) -> None:
        """Record that a plan from `start` to `ends` found nothing to do for the streams `at_rest`."""
        for name in at_rest:
            del self._changed[name]
        self._valid_for = (start, ends)
