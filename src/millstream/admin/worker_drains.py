"""Drains: an operator lets one worker process finish its running messages and end, and its supervisor not restart it.

The supervisor reads the request in the script that renews its worker's name, so it notices it within some seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from millstream.admin.inspection import find_handlers
from millstream.admin.liveness import announced_workers
from millstream.errors import AccessDenied, ConfigError, MillstreamError, WrongType
from millstream.groups.group import consumers_of
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age
from millstream.redis_client.key_names import HandlerKeys, check_identifier, worker_drain_key, worker_name_key
from millstream.redis_client.pipelining import send_all, server_time_ms

_KEPT_MS = 24 * 3_600_000
_MOST_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class SupervisedWorker:
    """A worker whose name a supervisor holds.

    * `holder`: the token of the supervisor
    * `drained_since_ms`: when its drain was requested, in Unix milliseconds; None if it was not
    """

    app: str
    name: str
    holder: bytes
    drained_since_ms: int | None


def find_supervised(client: Client, names: Iterable[tuple[str, str]]) -> list[SupervisedWorker]:
    """Those of `names`, by app and name, that a supervisor holds and this user may read.

    Raises AccessDenied if this user may read none, and RedisError.
    """
    asked = list(names)
    keys = [key for one in asked for key in (worker_name_key(*one), worker_drain_key(*one))]
    replies = send_all(client, [("GET", key) for key in keys])
    denied = [one for one in replies if isinstance(one, AccessDenied)]
    if denied and len(denied) == len(replies):
        raise denied[0]
    values = [None if isinstance(one, AccessDenied | WrongType) else raise_if_error(one) for one in replies]
    return [
        SupervisedWorker(app=app, name=name, holder=holder, drained_since_ms=_since(drain, holder))
        for (app, name), holder, drain in zip(asked, values[::2], values[1::2], strict=True)
        if holder is not None
    ]


def find_worker(client: Client, name: str, app: str | None) -> SupervisedWorker:
    """The worker `name` of `app`, or of the only app that has one.

    Raises ConfigError for what can name none, and if several apps have one; MillstreamError if none runs; RedisError.
    """
    check_identifier("worker name", name)
    known = find_handlers(client)
    apps = [check_identifier("app", app)] if app else sorted({one.app for one in known})
    found = find_supervised(client, [(one, name) for one in apps])
    if len(found) > 1:
        apps = [one.app for one in found]
        raise ConfigError(f"several apps have a worker {name!r}: add --app and one of {', '.join(apps)}")
    if not found:
        raise MillstreamError(_why_none(client, name, [one for one in known if one.app in apps]))
    return found[0]


def request_drain(client: Client, worker: SupervisedWorker) -> SupervisedWorker:
    """Request the drain of a worker, for a day; return the worker with the time of the request. Raises RedisError.

    A repeated request changes nothing.
    """
    if worker.drained_since_ms is not None:
        return worker
    now_ms = server_time_ms(client)
    key = worker_drain_key(worker.app, worker.name)
    client.execute("SET", key, b"%b %d" % (worker.holder, now_ms), "PX", _KEPT_MS)
    return replace(worker, drained_since_ms=now_ms)


def _since(drain: bytes | None, holder: bytes) -> int | None:
    """When a drain was requested; None if it was requested of an earlier holder of the name."""
    token, _, since = (drain or b"").partition(b" ")
    return int(since) if token == holder and since.isdigit() else None


def _why_none(client: Client, name: str, known: Sequence[HandlerKeys]) -> str:
    """Why there is no worker of this name: when it was last seen, and which ones there are."""
    silent = _idle_ms(client, known).get(name)
    what = (
        f"there is no worker {name!r}"
        if silent is None
        else f"worker {name!r} is not running under a supervisor: its last call was {format_age(silent)} ago"
    )
    alive = sorted({name for names in announced_workers(client, known).values() for name in names})
    shown = ", ".join(map(escape, alive[:_MOST_NAMED])) + (", ..." if alive[_MOST_NAMED:] else "")
    return f"{what}; {f'these run: {shown}' if alive else 'no worker runs'}"


def _idle_ms(client: Client, known: Sequence[HandlerKeys]) -> Mapping[str, int]:
    """For how long each consumer of these handlers has been idle on all its streams, in milliseconds, by its name."""
    least: dict[str, int] = {}
    for consumers in consumers_of(client, [(one.stream, one.group) for one in known]).values():
        for one in consumers:
            least[one.name] = min(one.idle_ms, least.get(one.name, one.idle_ms))
    return least
