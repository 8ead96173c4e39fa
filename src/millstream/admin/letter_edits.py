"""Edits of a dead letter: the fields of the copy that is redriven in its place, and how they differ from its own."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from millstream.delivery.dead_letter_queue import unedited
from millstream.redis_client.escaping import escape
from millstream.redis_client.replies import pairs_of


@dataclass(frozen=True, kw_only=True)
class LetterEdit:
    """How the fields of a copy differ from those of its dead letter: the names of each kind, in their order."""

    changed: tuple[bytes, ...]
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]

    def describe(self) -> str:
        """The names, escaped; "no field is changed" without any."""
        kinds = (("changed", self.changed), ("added", self.added), ("removed", self.removed))
        found = [f"{', '.join(map(escape, names))} {kind}" for kind, names in kinds if names]
        return "; ".join(found) or "no field is changed"


def edit(pairs: Sequence[bytes], values: Mapping[bytes, bytes], removed: Collection[bytes] = ()) -> list[bytes]:
    """The fields with these values, at the place of the first field of a name, or at the end; without those `removed`."""
    left = dict(values)
    found: list[bytes] = []
    for name, value in pairs_of(pairs):
        if name in left:
            found += (name, left.pop(name))
        elif name not in removed and name not in values:
            found += (name, value)
    return [*found, *(one for pair in left.items() for one in pair)]


def compare(before: Sequence[bytes], after: Sequence[bytes]) -> LetterEdit:
    """How two entries differ. What says that an entry was edited is no field of its own."""
    old, new = _by_name(before), _by_name(after)
    return LetterEdit(
        changed=tuple(name for name in new if name in old and old[name] != new[name]),
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
    )


def _by_name(pairs: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for name, value in pairs_of(unedited(pairs)):
        found.setdefault(name, []).append(value)
    return found
