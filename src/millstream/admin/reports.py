"""What there is in Redis, as it was found: streams, their groups, and the handlers. No I/O."""

from dataclasses import dataclass
from typing import Literal

Engine = Literal["workers", "spark"]


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """A consumer group.

    * `position`: the last id that it was given; `read`: how many entries were, None if Redis cannot say
    * `consumers`, `pending`: how many are registered, and what they hold
    * `alive`: those that were heard of within a minute; of a stage, its run
    * `counted`: whether the rest is known, as it is but for the groups of handlers
    * `lag`, `lag_exact`, `oldest_age_ms`: as of a handler
    * `shared`: a query on Spark is one of the consumers (readAs=group)
    """

    name: str
    consumers: int
    pending: int
    position: str
    read: int | None
    alive: tuple[str, ...] = ()
    counted: bool = False
    lag: int | None = None
    lag_exact: bool = False
    oldest_age_ms: int | None = None
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class StreamReport:
    """A stream: its length, the ids at its ends (None if it is empty), the age of its oldest entry, its groups.

    `added`: how many entries it was ever given.
    """

    name: str
    length: int
    added: int
    first_id: str | None
    last_id: str | None
    last_generated_id: str
    oldest_age_ms: int | None
    groups: tuple[GroupReport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HandlerReport:
    """How far a handler is on one stream.

    * `engine`: who runs it, or ran it last; `keyed`: it has a key, as far as Redis is told
    * `frontier`: all up to this id is committed, on workers but for what is pending; None before the first commit
    * `lag`: entries that are not committed; None if that is unknown. A lower bound unless `lag_exact`
    * `oldest_age_ms`: age of the first of them
    * `consumers`, `pending`: the workers, or runs on Spark, that are alive, and what all of them have in hand, or Spark
      has set aside. `workers`: their names
    * `oldest_pending_age_ms`: age of the first entry that is pending
    * `committed`, `written`, `dead`, `refused`: messages committed, outputs written, dead letters ever given,
      commits refused because another run had made them
    * `waiting`: dead letters in its box now; `parked`: keys that wait for a person, or to move to another partition
    * `paused`: its workers read nothing new for now
    * `problem`: what Redis holds there that no handler has written, so that the rest is not known; None if all is well
    """

    app: str
    handler: str
    stream: str
    engine: Engine
    keyed: bool
    frontier: str | None
    lag: int | None
    lag_exact: bool
    oldest_age_ms: int | None
    consumers: int
    workers: tuple[str, ...]
    pending: int
    oldest_pending_age_ms: int | None
    committed: int
    written: int
    dead: int
    refused: int
    waiting: int
    parked: int
    paused: bool
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Streams, sorted by name, and what handlers do on them, sorted by handler.

    `hidden_streams`, `hidden_handlers`: how many more there are that this user has no right to look at.
    """

    streams: tuple[StreamReport, ...]
    handlers: tuple[HandlerReport, ...]
    hidden_streams: int = 0
    hidden_handlers: int = 0
