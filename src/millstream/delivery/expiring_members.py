"""Members that expire: values of an app in a sorted set, each scored with the time until which it is kept."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from millstream.errors import AccessDenied, WrongType
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.pipelining import send_all
from millstream.redis_client.replies import pairs_of
from millstream.redis_client.scripts import Script

HOLD_MEMBERS = Script("shared/hold_members")

T = TypeVar("T", bound=msgspec.Struct)


def hold_members(client: Client, held_ms: int, values: Mapping[str, Sequence[msgspec.Struct]]) -> None:
    """Keep the values of each key for `held_ms` milliseconds from now, in one round trip; 0 removes them.

    May be repeated. Raises RedisError.
    """
    client.scripts([_hold_call(key, held_ms, some) for key, some in values.items()])


def replace_members(
    client: Client, key: str, held_ms: int, *, kept: Sequence[msgspec.Struct], ended: Sequence[msgspec.Struct]
) -> None:
    """Remove the values that have `ended`, and keep others for `held_ms` milliseconds from now, in one round trip.

    May be repeated. Raises RedisError.
    """
    if calls := [_hold_call(key, ms, some) for ms, some in ((0, ended), (held_ms, kept)) if some]:
        client.scripts(calls)


def _hold_call(
    key: str, held_ms: int, values: Sequence[msgspec.Struct]
) -> tuple[Script, tuple[str], tuple[int | bytes, ...]]:
    return HOLD_MEMBERS, (key,), (held_ms, *map(msgspec.json.encode, values))


def read_members(
    client: Client, keys: Iterable[str], kind: type[T], now_ms: float, *, may_be_denied: bool = True
) -> list[list[tuple[T, float]]]:
    """Return for each key its values, each with the time until which it is kept (Unix milliseconds), in that order.

    Of a key of another type none, nor of one that this user may not read, if `may_be_denied`. Raises RedisError.
    """
    without = (AccessDenied, WrongType) if may_be_denied else WrongType
    replies = send_all(client, [("ZRANGE", key, 0, -1, "WITHSCORES") for key in keys])
    return [
        [] if isinstance(reply, without) else list(_decoded(pairs_of(raise_if_error(reply)), kind, now_ms))
        for reply in replies
    ]


def _decoded(pairs: Iterable[tuple[bytes, bytes]], kind: type[T], now_ms: float) -> Iterable[tuple[T, float]]:
    for member, until_ms in pairs:
        if float(until_ms) > now_ms:
            try:
                yield msgspec.json.decode(member, type=kind), float(until_ms)
            except (msgspec.MsgspecError, UnicodeDecodeError):  # another program has written there
                continue
