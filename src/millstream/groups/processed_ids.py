"""ProcessedIds: ids that a consumer has processed, on its own disk: a Redis that lost its last second repeats none.

The specification lets a consumer keep its last processed id. One id is not enough once entries are claimed, or once a
group that went back in time delivers the same entries in another order: entries below it may be unprocessed. So the
latest ids are kept one by one, and only these are skipped. The file is a log: all ids that were kept when it was
rewritten, then a line for each call of `add`. A crash may leave the last line incomplete: one that was not acknowledged.
"""

import base64
import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from millstream.errors import ConfigError
from millstream.redis_client.key_names import from_wire, to_wire

_MAGIC = b"millstream-done-2"


class ProcessedIds:
    """The last `keep` ids that one consumer has processed of each stream, in the file at `path`.

    `add` returns when the ids would survive a power cut: it appends them, and at first and after each `keep` of them it
    rewrites the file. A crash at any point leaves the file as it was before or after. It belongs to one consumer in one
    process; its threads may share the object. Choose `keep` larger than the number of entries processed while Redis can
    forget (a second or two): older ids are not recognised. Raises ConfigError for a file that is damaged or something
    else, and OSError if the disk refuses.
    """

    def __init__(self, path: Path, *, keep: int = 10_000) -> None:
        self._path = path
        self._keep = keep
        self._lock = threading.Lock()
        self._order: dict[str, deque[bytes]] = {}
        self._known: dict[str, set[bytes]] = {}
        self._appended = float("inf")  # since the file was rewritten: not yet, or the last write failed
        for stream, ids in _load(path):
            self._remember(from_wire(stream), ids)

    def __contains__(self, place: tuple[str, bytes]) -> bool:
        """Whether the entry `(stream, id)` is known to be processed."""
        stream, entry_id = place
        return entry_id in self._known.get(stream, ())

    def last_id(self, stream: str) -> bytes | None:
        """The id that was added last, or None: the offset of a consumer that processes entries in order."""
        order = self._order.get(stream)
        return order[-1] if order else None

    def add(self, stream: str, ids: Iterable[bytes]) -> None:
        """Store `ids` as processed; they are on disk when this returns."""
        given = list(ids)
        with self._lock:
            self._remember(stream, given)
            appended, self._appended = self._appended + len(given), float("inf")
            if appended < self._keep and self._path.exists():
                self._write(self._path, "ab", {to_wire(stream): given})
                self._appended = appended
            else:
                self._rewrite()
                self._appended = 0

    def _write(self, path: Path, mode: str, kept: dict[bytes, list[bytes]]) -> None:
        body = base64.b64encode(msgspec.msgpack.encode(kept))
        with path.open(mode) as file:
            file.write(b"%s %s %s\n" % (_MAGIC, _digest(body), body))
            file.flush()
            os.fsync(file.fileno())

    def _rewrite(self) -> None:
        temporary = self._path.with_name(f"{self._path.name}.new")
        self._write(temporary, "wb", {to_wire(name): list(order) for name, order in self._order.items()})
        temporary.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)  # the rename is durable once it is synced too
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _remember(self, stream: str, ids: Iterable[bytes]) -> None:
        order = self._order.setdefault(stream, deque())
        known = self._known.setdefault(stream, set())
        for entry_id in ids:
            if entry_id not in known:
                known.add(entry_id)
                order.append(entry_id)
        while len(order) > self._keep:
            known.remove(order.popleft())


def _load(path: Path) -> list[tuple[bytes, list[bytes]]]:
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    if not torn and lines[1:] and not _parse(lines[-1]):
        lines.pop()  # only its end had reached the disk
    kept = [one for one in map(_parse, lines) if one]
    if not kept or len(kept) < len(lines):
        raise ConfigError(
            f"{path} is damaged, or no file of processed ids: restore it, or delete it and accept that entries which "
            "Redis has forgotten may be processed again"
        )
    return [item for one in kept for item in one.items()]


def _parse(line: bytes) -> dict[bytes, list[bytes]]:
    head, _, body = line.rpartition(b" ")
    is_sound = head == b"%s %s" % (_MAGIC, _digest(body))
    return msgspec.msgpack.decode(base64.b64decode(body), type=dict[bytes, list[bytes]]) if is_sound else {}


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
