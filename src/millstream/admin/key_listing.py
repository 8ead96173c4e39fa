"""Key queues of handlers, as `millstream key list` and the console list them."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from millstream.admin.key_queues import KeyQueue, having_stuck_keys, list_queues, queue_usage
from millstream.admin.liveness import find_runs, find_workers
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.pause import Pause
from millstream.errors import AccessDenied, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import HandlerKeys

_MOST_KEYS = 100_000
"""Keys that are read of a handler on a stream."""

MessageRef = tuple[str, str, str]
"""Handler, stream and id, printable."""
IsWanted = Callable[[HandlerKeys, KeyQueue], bool]
"""Selects key queues of a handler on a stream."""


@dataclass(frozen=True, kw_only=True)
class HandlerOnStream:
    """A handler on a stream, with its wanted key queues and its pause; `usage`: how many messages they hold, and the limit."""

    keys: HandlerKeys
    pause: Pause | None = None
    queues: list[KeyQueue] = field(default_factory=list)
    usage: tuple[int, int] | None = None


def is_running(client: Client, existing: Sequence[HandlerKeys]) -> bool:
    """True if a worker, or a run on Spark, of any of these is alive; for want of rights some may not be seen."""
    return any(find_workers(client, existing).values()) or bool(
        find_runs(client, {(keys.app, keys.handler) for keys in existing})
    )


def read_pauses(client: Client, existing: Sequence[HandlerKeys]) -> dict[HandlerKeys, Pause]:
    """The pauses of these handlers. Leaves out handlers that this user may not access on all of these streams. Raises RedisError."""
    by_handler: dict[tuple[str, str], dict[str, HandlerKeys]] = defaultdict(dict)
    for keys in existing:
        by_handler[keys.app, keys.handler][keys.stream] = keys
    found: dict[HandlerKeys, Pause] = {}
    for (app, handler), of_stream in by_handler.items():
        with suppress(AccessDenied, WrongType):
            pauses = CommitStore(client, app=app, handler=handler).paused_streams(list(of_stream))
            found |= {of_stream[stream]: pause for stream, pause in pauses.items()}
    return found


def read_key_queues(
    client: Client,
    existing: Sequence[HandlerKeys],
    pauses: Mapping[HandlerKeys, Pause] | None,
    is_wanted: IsWanted,
    *,
    running: Collection[MessageRef],
    stuck_only: bool,
    report: Callable[[str], None],
) -> list[HandlerOnStream]:
    """The wanted key queues of these handlers. Leaves out what this user may not access, unless that is all of it.

    * `pauses`: those of these handlers; None if neither they nor the usage are wanted
    * `running`: messages whose keys are read in any case; `stuck_only`: only handlers that may have stuck keys
    * `report`: called with one sentence for each handler whose keys are unreadable

    Raises RedisError.
    """
    places: list[HandlerOnStream] = []
    refusals: list[AccessDenied] = []
    if stuck_only:
        named = {(handler, stream) for handler, stream, _ in running}
        stuck = set(having_stuck_keys(client, existing))
        existing = [one for one in existing if one in stuck or (one.label, escape(one.stream)) in named]
    for keys in existing:
        try:
            queues = [one for one in list_queues(client, keys, most=_MOST_KEYS) if is_wanted(keys, one)]
            usage, pause = (None, None) if pauses is None else (queue_usage(client, keys), pauses.get(keys))
            places.append(HandlerOnStream(keys=keys, queues=queues, usage=usage, pause=pause))
        except AccessDenied as error:
            refusals.append(error)
        except WrongType as error:
            report(f"{keys.label} on {escape(keys.stream)} is unreadable: {error}")
    if refusals and not places:
        raise refusals[0]
    return places
