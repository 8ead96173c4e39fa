"""Events of a reader: what it reports besides entries, as values."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecreated:
    """The group, or its whole stream, was deleted or lost; this reader has created it again.

    * `at`: where it now begins: only entries with greater ids are delivered
    * `cause`: the error from Redis
    """

    stream: str
    group: str
    at: str
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Redis answers again after `away_ms` milliseconds; `cause` is the last error before."""

    away_ms: float
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EntriesGone:
    """Pending entries can never be processed: a client trimmed or deleted them before they were acknowledged."""

    stream: str
    ids: Sequence[bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """Redis delivered entries that this consumer had processed; the reader acknowledged and dropped them."""

    stream: str
    ids: Sequence[bytes]


Event = GroupRecreated | Resumed | EntriesGone | Repeated
