"""A console in this process of which a test gives some parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millstream.services.console.app import ConsoleParts, make_console
from millstream.services.console.client_pool import ClientPool
from millstream.services.console.guard import make_guard
from millstream.services.console.redrive_threads import RedriveThreads
from millstream.services.console.rights import ConsoleTokens
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_ranking import StreamRanking
from tests.support.clocks import ManualClock
from tests.support.consoles import Browser, client_of, write_tokens

HOUR_MS = 3_600_000.0


@contextmanager
def console_with(
    url: str, folder: Path, level: str = "figures", *, names: StreamNames | None = None, **given: Any
) -> Iterator[tuple[ConsoleParts, Browser]]:
    """A console with these parts, and a browser that has logged in with the token of `level`."""
    tokens, clients = ConsoleTokens(), ClientPool(url)
    tokens.read(write_tokens(folder))
    names = names or StreamNames(url, wait_ms=HOUR_MS, clock=ManualClock())
    others = {"ranking": StreamRanking(url, names, wait_ms=HOUR_MS), "redrives": RedriveThreads(url)}
    guard = make_guard(clients, tokens, None)
    parts = ConsoleParts(clients=clients, guard=guard, names=names, **{**others, **given})
    with client_of(make_console(parts)) as http:
        browser = Browser(http)
        browser.log_in(level)
        yield parts, browser
    clients.close()
