"""Parsers of replies of Redis: alternating names and values as pairs, the fields of INFO, and the server's time."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def pairs_of(items: Sequence[T]) -> Iterator[tuple[T, T]]:
    """Yield the pairs of a reply that alternates names and values (HGETALL, XINFO, WITHSCORES, fields of an entry)."""
    return zip(items[::2], items[1::2], strict=True)


def mapping_of(items: Sequence[T]) -> dict[T, T]:
    """Return such a reply as a mapping."""
    return dict(pairs_of(items))


def fields_of_info(reply: bytes) -> dict[str, str]:
    """Return the fields of a reply to INFO or CLUSTER INFO."""
    lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def time_us_of(reply: Sequence[bytes]) -> int:
    """Return a reply to TIME in Unix microseconds."""
    seconds, microseconds = reply
    return int(seconds) * 1_000_000 + int(microseconds)


def time_ms_of(reply: Sequence[bytes]) -> int:
    """Return a reply to TIME in Unix milliseconds."""
    return time_us_of(reply) // 1000
