"""Where messages are stuck: handlers on streams with dead letters or stuck keys, found by the names of their keys."""

from contextlib import suppress

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import PREFIX, HandlerKeys, from_wire

_KINDS = (HandlerKeys.dead_letters, HandlerKeys.parked, HandlerKeys.backoff, HandlerKeys.crashes)
"""Redis deletes these keys when they are empty, so that their names suffice."""

_SUFFIXES = tuple(f":{one.suffix}" for one in _KINDS)
_PATTERN = f"{PREFIX}:*:[{''.join(sorted(one.suffix[0] for one in _KINDS))}]*"


def find_stuck_places(
    client: Client,
    app: str | None = None,
    *,
    most: int,
    budget_ms: float = 1_000.0,
    clock: Clock = SYSTEM_CLOCK,
) -> tuple[list[HandlerKeys], bool]:
    """Handlers of `app`, or all, on streams where they have dead letters or may have stuck keys, sorted by name; and whether
    there may be more.

    It scans the names of all keys for `budget_ms` milliseconds, or until it has found `most`. Raises RedisError.
    """
    end_ms = clock.monotonic_ms() + budget_ms
    found: set[HandlerKeys] = set()
    is_partial = False
    for page in client.scan_key_pages(_PATTERN):
        for name in map(from_wire, page):
            with suppress(ConfigError):  # a key of another program
                if name.endswith(_SUFFIXES) and app in (None, (keys := HandlerKeys.parse(name)).app):
                    found.add(keys)
        if len(found) >= most or clock.monotonic_ms() >= end_ms:
            is_partial = True
            break
    return sorted(found, key=lambda keys: (keys.app, keys.handler, keys.stream))[:most], is_partial
