"""States that expire, on servers whose hash fields cannot: when a state expires is stored with it, and readers check it.

Servers before Redis 7.4 and Valkey 9 have no HPEXPIRE. The scripts store and check expiries in the same way
(lua/include/expiring_state.lua).
"""

from collections.abc import Sequence

from millstream.redis_client.client import Client
from millstream.redis_client.replies import time_ms_of
from millstream.redis_client.resp import Arg

_MARK = b"\xc1"  # never the first byte of msgpack (its specification, "Formats"), and so of no other state
_MAX_DIGITS = 15


def split_expiry(stored: bytes) -> tuple[bytes, int | None]:
    """Return a state as it was committed, and when it expires, in Unix milliseconds; None: the hash field may expire."""
    if stored[:1] == _MARK:
        expires, space, state = stored[1:].partition(b" ")
        if space and expires.isdigit() and len(expires) <= _MAX_DIGITS:
            return state, int(expires)
    return stored, None


def live_states(client: Client, key: Arg, stored: Sequence[bytes | None]) -> Sequence[bytes | None]:
    """Return the states as they were committed; None for those that have expired, and where there was none.

    `key`: the hash that they are from. Only if one of them can expire, its server is asked for the time. Raises RedisError.
    """
    if not any(one is not None and one[:1] == _MARK for one in stored):
        return stored
    return [None if one is None else one[0] for one in live_states_and_expiries(client, key, stored)]


def live_states_and_expiries(
    client: Client, key: Arg, stored: Sequence[bytes | None]
) -> list[tuple[bytes, int | None] | None]:
    """As `live_states`; each with its expiry, as in `split_expiry`. Raises RedisError."""
    found = [None if one is None else split_expiry(one) for one in stored]
    if not any(one is not None and one[1] is not None for one in found):
        return found
    now_ms = time_ms_of(client.execute_on_node_of(key, "TIME"))
    return [None if one is None or (one[1] is not None and one[1] <= now_ms) else one for one in found]
