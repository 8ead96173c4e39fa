"""RESP on a socket: how commands are packed, which key routes them, and a non-blocking connection.

`millstream.redis_client.client` opens every connection and translates every error; this module is the layer between.
"""

import select
import ssl
from binascii import crc_hqx
from collections.abc import Callable, Iterator, Sequence
from socket import socket
from typing import Any, overload

import hiredis

from millstream.errors import Unavailable
from millstream.redis_client.key_names import from_wire, to_wire

Arg = bytes | str | int | float
Command = Sequence[Arg]
Reply = Any
Push = hiredis.PushNotification
"""An unsolicited message of the server, as a list whose first element is its kind (Redis protocol, RESP3)."""

Parser = hiredis.Reader
"""Parses the bytes of replies to Python objects."""

Node = tuple[str, int]
"""Host and port of a server, such as a node of a cluster."""

_SLOT_COUNT = 16_384
CHUNK_BYTES = 1 << 15
"""Bytes per read. No more, since hiredis moves its unparsed bytes with every kilobyte it parses."""

_KEYLESS = frozenset(("PING", "SCAN", "INFO", "WAIT", "TIME", "CLIENT", "SCRIPT", "CONFIG", "ACL", "CLUSTER", "ROLE"))
_KEY_SECOND = frozenset(("XINFO", "XGROUP", "OBJECT", "MEMORY"))

_pack: Callable[[tuple[Arg, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment] # stub: 1 word only


def pack_command(command: Command) -> bytes:
    """The command in RESP; surrogates in text stand for the bytes they came from."""
    try:
        return _pack(tuple(command))
    except UnicodeEncodeError:  # rare, and a check beforehand would cost every command
        return _pack(tuple(to_wire(part) if isinstance(part, str) else part for part in command))


class PackedCommands(Sequence[Command]):
    """Commands in RESP, `count` of them. One that is asked for is unpacked, for a message about it."""

    def __init__(self, data: bytes, count: int) -> None:
        self.data = data
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Command: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Command]: ...
    def __getitem__(self, index: int | slice) -> Command | Sequence[Command]:
        if isinstance(index, slice) and index.indices(self._count) == (0, self._count, 1):
            return self
        return next(self._unpack()) if index == 0 else list(self._unpack())[index]  # the first one for each round trip

    def _unpack(self) -> Iterator[Command]:
        reader = hiredis.Reader()
        reader.feed(self.data)
        while command := reader.gets():
            yield [from_wire(word) for word in command]


def pack_all(commands: Sequence[Command]) -> bytes:
    """Several commands, one after the other, in RESP."""
    return commands.data if isinstance(commands, PackedCommands) else b"".join(map(pack_command, commands))


def routing_key(command: Command) -> Arg | None:
    """The key that routes a command; None where any primary will do."""
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
    return crc_hqx(key, 0) % _SLOT_COUNT


def slot_owners(reply: Any) -> list[Node | None]:
    """The node that owns each hash slot, by the reply to CLUSTER SLOTS; None where none does.

    The host of a node that does not know it is "".
    """
    owners: list[Node | None] = [None] * _SLOT_COUNT
    for first, last, primary, *_ in reply:
        owners[first : last + 1] = [(primary[0].decode(), primary[1])] * (last - first + 1)
    return owners


class ReplySize:
    """Counts the bytes of replies, and stops reading after `most`: `exceeded` says that it did."""

    def __init__(self, most: float) -> None:
        self._most = most
        self.total_bytes = 0

    @property
    def exceeded(self) -> bool:
        """Whether the replies were larger than allowed."""
        return self.total_bytes > self._most

    def read_all(self, opened: socket, reader: Parser, nothing: object, count: int) -> list[Any]:
        """The next `count` replies; `nothing` is what `reader` returns while a reply is incomplete.

        Raises OSError: then the connection is unusable.
        """
        return [self._read(opened, reader, nothing) for _ in range(count)]

    def _read(self, opened: socket, reader: Parser, nothing: object) -> Any:
        while (reply := reader.gets(False)) is nothing:
            data = opened.recv(CHUNK_BYTES)
            self.add(len(data))
            reader.feed(data)
        return reply

    def add(self, received: int) -> None:
        """Count the bytes of one read from the socket. Raises OSError if they are none, or too many in all."""
        if not received:
            raise ConnectionResetError("the server closed the connection")
        self.total_bytes += received
        if self.exceeded:
            raise ConnectionAbortedError(f"the replies are larger than {self._most:,} bytes")


class Redirection(Unavailable):
    """A redirection of a cluster: `node` serves the slot; with `asking`, for one request only."""

    def __init__(self, text: str) -> None:
        kind, slot, address = text.split()[:3]
        host, _, port = address.rpartition(":")
        super().__init__(f"the cluster serves slot {slot} at {address}")
        self.node: Node = (host, int(port))
        self.asking = kind == "ASK"


class RespConnection:
    """An open connection that never blocks but in one call: send commands, and read what has arrived.

    Replies come in order, with `Push` messages among them. Created by `Client.dial`. Not thread-safe. `translate` turns
    a failed connection, and the text of an error reply, into errors of millstream: error replies are returned as
    values, errors of the connection are raised.
    """

    def __init__(self, opened: socket, *, translate: Callable[[str | OSError], Exception]) -> None:
        opened.setblocking(False)
        self._socket = opened
        self._translate = translate
        self._reader = hiredis.Reader(replyError=translate)
        self._unsent = bytearray()
        self._received_bytes = 0

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """True while bytes are unsent: call `flush` when the socket is writable."""
        return bool(self._unsent)

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands; bytes that the socket does not accept now are kept for `flush`."""
        self._unsent += b"".join([pack_command(command) for command in commands])
        self.flush()

    def flush(self) -> None:
        """Send unsent bytes, as far as the socket accepts them."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            raise self._translate(error) from error

    def receive(self) -> list[Any]:
        """The complete replies that have arrived; [] if there are none. A selector may report more."""
        self.fill()
        return list(self.replies())

    def wait_and_receive(self, timeout_ms: float) -> list[Any]:
        """Wait until something arrives or unsent bytes can be sent; return the complete replies, [] if there are none.

        The only call that blocks. Raises Unavailable after `timeout_ms` milliseconds.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | (select.POLLOUT if self.has_unsent else 0))
        if not self._has_decrypted() and not poller.poll(timeout_ms):
            raise Unavailable(f"no reply for {timeout_ms / 1000:.0f} s")
        if self.has_unsent:
            self.flush()
        return self.receive()

    def fill(self) -> int:
        """Read about CHUNK_BYTES at most into the parser, for `replies`. Returns how many bytes those were."""
        before = self._received_bytes
        try:
            self._feed()
            while self._has_decrypted():  # no selector reports it
                self._feed()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            raise self._translate(error) from error
        return self._received_bytes - before

    def replies(self) -> Iterator[Any]:
        """The complete replies, one by one: a list of thousands would be work for the garbage collector."""
        gets = self._reader.gets
        while (reply := gets()) is not False:
            yield reply

    def _feed(self) -> None:
        data = self._socket.recv(CHUNK_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._received_bytes += len(data)
        self._reader.feed(data)

    def _has_decrypted(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
