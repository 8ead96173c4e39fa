"""What PySpark's server of accumulators prints where Java closes a connection to it, as a stop does that interrupts Java."""

import inspect
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark import accumulators

from millstream.spark.versions import hide_closed_connections
from tests.support.waiting import eventually

pytestmark = pytest.mark.spark

TOKEN = "the token of this session"


@pytest.fixture
def address(caplog: pytest.LogCaptureFixture) -> Iterator[tuple[str, int]]:
    """The address of such a server."""
    caplog.set_level(logging.DEBUG)
    start: Any = accumulators._start_update_server
    server = start(*(TOKEN, False)[: len(inspect.signature(start).parameters)])  # 4.0 has no Unix sockets
    hide_closed_connections(server)
    yield server.server_address
    server.shutdown()


@pytest.mark.parametrize("sent", [b"", TOKEN[:5].encode(), TOKEN.encode(), TOKEN.encode() + b"\0\0"])
def test_a_connection_that_was_closed_before_all_was_sent_is_no_traceback(
    address: tuple[str, int], sent: bytes, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
    eventually(lambda: "Java has closed its connection" in caplog.text, "the end of the connection")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("sent", [b"a" * len(TOKEN), TOKEN.encode() + b"\0\0\0\1\0\0\0\1a"], ids=["token", "update"])
def test_what_is_wrong_on_an_open_connection_is_printed(
    address: tuple[str, int], sent: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = ""

    def is_printed() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return "Error" in printed

    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        eventually(is_printed, "the traceback")
