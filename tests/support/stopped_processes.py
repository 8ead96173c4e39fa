"""Processes that a signal stops, and the moment from which Redis gets nothing more from them."""

from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.waiting import eventually

_LOOPBACK = Path("/proc/net/tcp")


def stop_and_await_silence(process: psutil.Process, port: int) -> None:
    """Stop all threads of a process; return when the server at this port of 127.0.0.1 has read all that it has sent.

    The server has executed that before the next command of the caller. SIGSTOP alone is not enough: a thread on another
    processor runs on for a moment, and what it has sent may still be in the socket.
    """
    process.suspend()
    eventually(lambda: _states_of(process) <= {"T"}, "the stop of all threads")
    eventually(lambda: not _unread_bytes(process, port), "a server that has read what the process has sent")


def _states_of(process: psutil.Process) -> set[str]:
    states: set[str] = set()
    for one in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            states.add(one.read_text().rpartition(")")[2].split()[0])
    return states


def _unread_bytes(process: psutil.Process, port: int) -> int:
    """The bytes between the process and the server: not yet sent, or not yet read."""
    ports = {one.laddr.port for one in process.net_connections("tcp4") if one.raddr and one.raddr.port == port}
    unread = 0
    for line in _LOOPBACK.read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        sent, received = (int(one, 16) for one in queues.split(":"))
        pair = _port_of(local), _port_of(remote)
        if pair[1] == port and pair[0] in ports:
            unread += sent
        elif pair[0] == port and pair[1] in ports:
            unread += received
    return unread


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
