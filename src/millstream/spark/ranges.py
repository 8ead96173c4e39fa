"""Pieces of streams, and how they are dealt out to Spark's tasks. No I/O.

One Spark task costs about 33 ms however little it does, so there are about as many as cores, each with pieces of
many streams.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from millstream.model import EntryId

_ENTRIES_WORTH_A_TASK = 2_000


class Piece(NamedTuple):
    """The entries of `stream` after `after`, up to and including `until`.

    * `size`: about how many they are
    * `rows`: exactly how many they must be; None where that is not known
    * `untouched`: nothing had ever been removed from the stream, so it is whole if that is still so after reading
    """

    stream: str
    after: EntryId
    until: EntryId
    size: int
    rows: int | None
    untouched: bool = False


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a batch is to be cut: see the source's options of these names."""

    min_partitions: int | None = None
    max_records: int | None = None
    cores: int = 1

    def target(self, total: int) -> int:
        """Most entries that one task should get of a batch of `total`."""
        tasks = self.min_partitions or min(self.cores, -(-total // _ENTRIES_WORTH_A_TASK))
        target = -(-total // max(tasks, 1))
        return max(1, min(target, self.max_records or target))

    def tasks(self, total: int) -> int:
        """Number of tasks for a batch of `total` entries."""
        return max(1, -(-total // self.target(total)))


def cut(piece: Piece, step: int, marks: Sequence[EntryId]) -> list[Piece]:
    """Cut `piece` at `marks`, which lie `step` entries apart."""
    pieces = []
    after, left = piece.after, piece.size
    for mark in marks:
        if not after < mark < piece.until:
            break
        pieces.append(Piece(piece.stream, after, mark, step, None if piece.rows is None else step))
        after, left = mark, left - step
    done = step * len(pieces)
    rest = None if piece.rows is None else piece.rows - done
    return [*pieces, Piece(piece.stream, after, piece.until, max(left, 1), rest)]


def guess_cuts(piece: Piece, parts: int) -> list[Piece]:
    """Cut `piece` into `parts` of even id space, without asking Redis: how many entries each holds is a guess.

    An id is taken as one number, milliseconds first; the width of its lower digits follows from the sequence numbers
    at both ends, so that entries that all came in one millisecond are spread too.
    """
    width = max(piece.after.seq, piece.until.seq) + 1
    first = piece.after.ms * width + piece.after.seq
    span = piece.until.ms * width + piece.until.seq - first
    marks = sorted({EntryId(*divmod(first + span * part // parts, width)) for part in range(1, parts)})
    size = -(-piece.size // parts)
    cuts = [piece.after, *(mark for mark in marks if piece.after < mark < piece.until), piece.until]
    return [piece._replace(after=a, until=b, size=size, rows=None) for a, b in pairwise(cuts)]


def deal(pieces: Iterable[Piece], tasks: int, max_size: int) -> list[list[Piece]]:
    """Deal `pieces` out to at most about `tasks` tasks of even size (greatest first, to the least loaded).

    A task is given more than `max_size` entries only where one piece is greater by itself.
    """
    loads: list[tuple[int, int]] = [(0, index) for index in range(tasks)]
    dealt: list[list[Piece]] = [[] for _ in range(tasks)]
    for piece in sorted(pieces, key=lambda piece: (-piece.size, piece.stream, piece.after)):
        load, index = loads[0]
        if load and load + piece.size > max_size:
            index, load = len(dealt), 0
            dealt.append([])
            heapq.heappush(loads, (piece.size, index))
        else:
            heapq.heapreplace(loads, (load + piece.size, index))
        dealt[index].append(piece)
    return [sorted(some) for some in dealt if some]
