"""What processes that fork to start others quickly have in common: they are ready, receive a request, and take its place."""

import gc
import os
import socket
from collections.abc import Mapping, Sequence

import psutil


def get_ready_to_fork() -> None:
    """After all imports: no thread may run, and what is loaded is shared with the forks."""
    assert psutil.Process().num_threads() == 1, "a fork loses threads"
    gc.freeze()


def receive(connection: socket.socket, size: int) -> bytes:
    """`size` bytes. Raises ConnectionError at the end of the connection."""
    received = b""
    while len(received) < size:
        more = connection.recv(size - len(received))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        received += more
    return received


def take_place(environment: Mapping[str, str], folder: str, pipes: Sequence[int]) -> None:
    """Give this process the environment, the folder and the standard streams of the one that it stands for."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
        os.close(pipe)
