"""Which handlers have a pattern that matches no stream, shown once when workers or a run on Spark start."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from millstream.cli.signals import OrderlyStop
from millstream.cli.terminal import print_message
from millstream.errors import RedisError
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape

_TIMEOUT_MS = 15_000
_POLL_S = 0.05


@contextmanager
def unmatched_patterns_shown(
    url: str, handlers: Sequence[Handler], stopping: OrderlyStop, *, once: bool
) -> Iterator[None]:
    """Print a line for each handler whose pattern matches no stream, beside the block: a scan of all keys may take long.

    With `once` the block ends after the last line, or at a signal; otherwise it waits for none after `stopping`.
    """
    wanted = [one for one in handlers if one.pattern is not None]
    thread = threading.Thread(target=_show, args=(url, wanted, stopping, once), name="millstream-patterns", daemon=True)
    if wanted:
        thread.start()
    yield
    while once and thread.is_alive() and not stopping.is_signalled:
        thread.join(_POLL_S)


def _show(url: str, handlers: Sequence[Handler], stopping: OrderlyStop, once: bool) -> None:
    # The workers, or the run, report what is wrong with this Redis, or with the rights of their user.
    with suppress(RedisError), Client(url, timeout_ms=_TIMEOUT_MS) as client:
        for handler in handlers:
            if not _is_matched(client, handler.pattern or "*", stopping, once):
                hence = "it processes nothing" if once else "it begins with the first one"
                print_message(
                    f"handler {handler.label}: no stream matches '{escape(handler.pattern or '*')}' yet; {hence}"
                )


def _is_matched(client: Client, pattern: str, stopping: OrderlyStop, once: bool) -> bool:
    """Return whether a stream matches, or the command ends before that is known.

    With `once`, `stopping` is set as well when all is processed, which ends no scan: only a signal does.
    """

    def ends() -> bool:
        return stopping.is_signalled if once else stopping.is_set()

    return ends() or any(names or ends() for names in client.scan_pages(pattern))
