"""ProcessedIds: ids that a consumer has processed, on its own disk, so that a Redis that lost its last second repeats
none.

The specification lets a consumer keep its last processed id. One id is not enough once entries are claimed, or once a
group that went back in time delivers the same entries in another order: entries below it may be unprocessed. So the
latest ids are kept one by one, and only these are skipped.
"""

import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from millstream.errors import ConfigError
from millstream.redis_client.key_names import from_wire, to_wire

_MAGIC = b"millstream-done-1"


class ProcessedIds:
    """The last `keep` ids that one consumer has processed of each stream, in the file at `path`.

    `add` returns when the ids would survive a power cut. A crash at any point leaves the file as it was before or
    after. The file belongs to one consumer in one process; its threads may share the object. Choose `keep` larger than
    the number of entries processed while Redis can forget (a second or two): older ids are not recognised. Raises
    ConfigError for a file that is damaged or something else, and OSError if the disk refuses.
    """

    def __init__(self, path: Path, *, keep: int = 10_000) -> None:
        self._path = path
        self._keep = keep
        self._lock = threading.Lock()
        self._order: dict[str, deque[bytes]] = {}
        self._known: dict[str, set[bytes]] = {}
        for stream, ids in _load(path).items():
            self._remember(stream, ids)

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
        with self._lock:
            self._remember(stream, ids)
            self._write(msgspec.msgpack.encode({to_wire(name): list(order) for name, order in self._order.items()}))

    def _write(self, body: bytes) -> None:
        temporary = self._path.with_name(f"{self._path.name}.new")
        with temporary.open("wb") as file:
            file.write(b"%s %s\n%s" % (_MAGIC, _digest(body), body))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        # The rename is durable only once the folder is synced too.
        folder = os.open(self._path.parent, os.O_RDONLY)
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


def _load(path: Path) -> dict[str, list[bytes]]:
    try:
        head, _, body = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return {}
    if head != b"%s %s" % (_MAGIC, _digest(body)):
        raise ConfigError(
            f"{path} is damaged, or no file of processed ids: restore it, or delete it and accept that entries which "
            "Redis has forgotten may be processed again"
        )
    kept = msgspec.msgpack.decode(body, type=dict[bytes, list[bytes]])
    return {from_wire(stream): ids for stream, ids in kept.items()}


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
