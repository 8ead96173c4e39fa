"""pytest fixtures with a real redis-server: `millstream_server`, `millstream_url`, `millstream_fresh_server`.

Without a usable redis-server their tests are skipped; if the environment variable CI is set, they fail.
Every pytest run with millstream installed loads this module, so the fixtures import lazily.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from millstream.redis_client.embedded_server import EmbeddedServer


@pytest.fixture(scope="session")
def millstream_server() -> "Iterator[EmbeddedServer]":
    """One server with an append-only file, shared by the whole test run: do not kill or reconfigure it."""
    _require_redis_server()
    from millstream.redis_client.embedded_server import EmbeddedServer

    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def millstream_url(millstream_server: "EmbeddedServer") -> str:
    """URL of the shared server, emptied for this test: like a new one, it has no scripts either."""
    millstream_server.call("FLUSHALL")
    millstream_server.call("SCRIPT", "FLUSH")
    return millstream_server.url


@pytest.fixture
def millstream_fresh_server() -> "Iterator[EmbeddedServer]":
    """A server of the test's own, which it may kill, restart and pause; a kill loses no acknowledged write."""
    _require_redis_server()
    from millstream.redis_client.embedded_server import EmbeddedServer

    with EmbeddedServer(extra={"appendfsync": "no"}) as server:
        yield server


def _require_redis_server() -> None:
    from millstream.errors import ServerError
    from millstream.redis_client.server_program import find_server_program

    try:
        find_server_program()
    except ServerError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
