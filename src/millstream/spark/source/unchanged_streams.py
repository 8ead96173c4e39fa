"""Which streams a look has to judge: what nothing was to be done about, and has not changed, need not be judged again. No I/O."""

from collections.abc import Collection, Iterable, KeysView

from millstream.spark.source.offsets import Offsets


class UnchangedStreams:
    """The streams that are not known to be at rest: all, until they are judged.

    A judgement holds for a place and the facts of a stream, and a subscription. So one of a look at `start` holds for the next
    look at the same offsets, or at those that came of it, which differ in streams that were not at rest.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._all = True
        self._places: tuple[Offsets, ...] = ()
        self._subscribed: Collection[str] | None = None

    def note(self, changed: Iterable[str] | None) -> None:
        """These have changed, or all may have (None)."""
        if changed is None:
            self._all = True
        else:
            self._names.update(dict.fromkeys(changed))

    def among(self, start: Offsets, subscribed: KeysView[str]) -> list[str]:
        """Those among the streams of `start` and `subscribed`."""
        known = subscribed is self._subscribed and any(start is place for place in self._places)
        if self._all or not known:
            self._names = dict.fromkeys((*start, *subscribed))
            self._all, self._places, self._subscribed = False, (start,), subscribed
        return list(self._names)

    def settle(self, at_rest: Iterable[str], start: Offsets, ends: Offsets) -> None:
        """A look at `start` has come to `ends`, and to nothing about these."""
        for name in at_rest:
            del self._names[name]
        self._places = (start, ends)
