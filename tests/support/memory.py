"""The memory of Redis: what a pending entry may take, and a Redis without memory until it has refused a write for it."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from millstream.redis_client.client import Client
from tests.support.waiting import FAIL_SAFE_S, eventually


def more_for_pending(client: Client) -> int:
    """Bytes that a pending entry may take on this server beyond those of Redis 7.0 and Valkey.

    For XACKDEL, Redis 8.2 and later keep which groups refer to an entry.
    """
    return 170 if client.execute("COMMAND", "INFO", "XACKDEL")[0] else 0


@contextmanager
def relieved_once_refused(url: str) -> Iterator[None]:
    """Redis refuses every write; after the first that it has refused, it has all the memory there is again."""
    with Client(url) as before, Client(url) as own:
        refused = refusals(before)
        before.execute("CONFIG", "SET", "maxmemory", "1")

        def relieve() -> None:
            try:
                eventually(lambda: refusals(own) > refused, "a write that is refused")
            finally:
                own.execute("CONFIG", "SET", "maxmemory", "0")

        thread = threading.Thread(target=relieve)
        thread.start()
        try:
            yield
        finally:
            thread.join(FAIL_SAFE_S)


def refusals(client: Client) -> int:
    """How many commands Redis has refused for lack of memory."""
    found = re.search(rb"errorstat_OOM:count=(\d+)", client.execute("INFO", "errorstats"))
    return int(found[1]) if found else 0
