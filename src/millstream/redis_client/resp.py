"""Redis' protocol on a socket: how commands are packed, which key routes them, and a connection that is read as it comes.

`millstream.redis_client.client` opens every connection and translates every error; here is only what lies between.
"""

import ssl
from binascii import crc_hqx
from collections.abc import Callable, Iterator, Sequence
from socket import socket
from typing import Any

import hiredis

from millstream.errors import Unavailable
from millstream.redis_client.key_names import to_wire

Arg = bytes | str | int | float
Command = Sequence[Arg]
Push = hiredis.PushNotification
"""What a server says unasked, as a list whose first word is its kind (Redis protocol, RESP3)."""

Node = tuple[str, int]
"""Host and port of a server, such as a node of a cluster."""

_SLOTS = 16_384
CHUNK_BYTES = 1 << 15
"""What is read at a time. No more, since hiredis moves what it has not parsed yet with every kilobyte that it has."""

_KEYLESS = frozenset(("PING", "SCAN", "INFO", "WAIT", "TIME", "CLIENT", "SCRIPT", "CONFIG", "ACL", "CLUSTER", "ROLE"))
_KEY_SECOND = frozenset(("XINFO", "XGROUP", "OBJECT", "MEMORY"))

_pack: Callable[[tuple[Arg, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment] # stub: 1 word only


def packed(command: Command) -> bytes:
    """The command as Redis reads it; text that is not valid Unicode stands for the bytes it came from."""
    try:
        return _pack(tuple(command))
    except UnicodeEncodeError:  # rare, and to look for it beforehand would cost every command
        return _pack(tuple(to_wire(part) if isinstance(part, str) else part for part in command))


def routing_key(command: Command) -> Arg | None:
    """The key that decides where a command goes; None where any primary will do."""
    name = str(command[0]).upper()
    if name in _KEYLESS:
        return None
    if name in _KEY_SECOND:
        return command[2]
    if name in ("EVAL", "EVALSHA"):
        return command[3] if int(command[2]) else None
    if name in ("XREAD", "XREADGROUP"):
        streams = next(i for i, part in enumerate(command) if str(part).upper() == "STREAMS")
        return command[streams + 1]
    return command[1] if len(command) > 1 else None


def slot_of(key: bytes) -> int:
    """The hash slot of `key` (Redis documentation, "Cluster specification")."""
    start = key.find(b"{") + 1
    if start and (end := key.find(b"}", start)) > start:
        key = key[start:end]
    return crc_hqx(key, 0) % _SLOTS


def primaries(reply: Any) -> list[Node | None]:
    """Which node has each hash slot, by the reply to CLUSTER SLOTS; None where none has."""
    owners: list[Node | None] = [None] * _SLOTS
    for first, last, primary, *_ in reply:
        owners[first : last + 1] = [(primary[0].decode(), primary[1])] * (last - first + 1)
    return owners


class ReplySize:
    """Counts the bytes of replies. What would be more than `most` is not taken in: `exceeded` says that it broke off."""

    def __init__(self, most: float) -> None:
        self._most = most
        self.taken = 0

    @property
    def exceeded(self) -> bool:
        """Whether more was on its way than may be taken in."""
        return self.taken > self._most

    def read(self, connected: socket, reader: hiredis.Reader, nothing: object) -> Any:
        """The next reply; `nothing` is what `reader` returns while it is not whole. Raises OSError: the connection is of no
        use then."""
        while (reply := reader.gets(False)) is nothing:
            data = connected.recv(CHUNK_BYTES)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self.taken += len(data)
            if self.exceeded:
                raise ConnectionAbortedError(f"the replies are larger than {self._most:,} bytes")
            reader.feed(data)
        return reply


class Redirection(Unavailable):
    """A cluster's word that a slot is served by `node`; with `asking`, for this once only."""

    def __init__(self, text: str) -> None:
        kind, slot, address = text.split()[:3]
        host, _, port = address.rpartition(":")
        super().__init__(f"the cluster serves slot {slot} at {address}")
        self.node: Node = (host, int(port))
        self.asking = kind == "ASK"


class RespConnection:
    """An open connection that never blocks: send, and take what has come in, replies in order and `Push` among them.

    Made by `Client.dial`. Not thread-safe. `translate` turns a failed connection, and the text of an error reply, into
    errors of millstream: error replies are values, of a failed connection the error is raised.
    """

    def __init__(self, connected: socket, *, translate: Callable[[str | OSError], Exception]) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._translate = translate
        self._reader = hiredis.Reader(replyError=translate)
        self._unsent = bytearray()
        self._fed_bytes = 0

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def clogged(self) -> bool:
        """True while something could not be sent yet: call `flush` when the socket can be written to."""
        return bool(self._unsent)

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands; what the socket does not take now is kept for `flush`."""
        self._unsent += b"".join([packed(command) for command in commands])
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            raise self._translate(error) from error

    def receive(self) -> list[Any]:
        """What has come in whole; [] if nothing has. A selector may call again when there is more."""
        self.take_in()
        return list(self.replies())

    def take_in(self) -> int:
        """Take in what has come, about CHUNK_BYTES at most, for `replies`. Returns how many bytes those were."""
        before = self._fed_bytes
        try:
            self._feed()
            while self._decrypted():  # no selector knows of it
                self._feed()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            raise self._translate(error) from error
        return self._fed_bytes - before

    def replies(self) -> Iterator[Any]:
        """What has been taken in whole, one by one: thousands at a time would be so much work for the garbage collector."""
        gets = self._reader.gets
        while (reply := gets()) is not False:
            yield reply

    def _feed(self) -> None:
        data = self._socket.recv(CHUNK_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._fed_bytes += len(data)
        self._reader.feed(data)

    def _decrypted(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
