"""`millstream streams`, `announce`, `release` and `done`: which consumer of a service has which stream."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from millstream.admin.inspection import inspect_handlers
from millstream.balancer.protocol import announce_all, end_leases, service_of
from millstream.balancer.service_status import ServiceState, StreamState, fetch_service_state
from millstream.cli.options import DEFAULT_URL, Json, Url, Yes
from millstream.cli.terminal import age, clip, confirm, counted, say, say_json, table, talk
from millstream.errors import AccessDenied, ConfigError, GroupMissing, MillstreamError, WrongType
from millstream.groups import groups_of
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import visible
from millstream.redis_client.key_names import HandlerKeys, ServiceKeys, from_wire

Service = Annotated[str, typer.Argument(help="The service that is announced to, or APP.HANDLER.", metavar="SERVICE")]
Streams = Annotated[list[str], typer.Argument(metavar="STREAM...")]
Announced = Annotated[
    list[str], typer.Argument(help="Their names; - reads them from standard input, one per line.", metavar="STREAM...")
]
Count = Annotated[int, typer.Option(min=1, help="Most streams to show, those that nobody has first.")]
Group = Annotated[str | None, typer.Option(help="The consumer group whose lag is shown; default: that of the handler.")]
Info = Annotated[str, typer.Option(help="What consumers are told of each stream, as JSON.")]

_NAME_CHARS = 60


@dataclass(frozen=True)
class _Lag:
    """How many entries wait; None if that is not known. A lower bound unless `exact`."""

    count: int | None = None
    exact: bool = False


def streams(
    service: Service, count: Count = 20, group: Group = None, url: Url = DEFAULT_URL, as_json: Json = False
) -> None:
    """Show a service's consumers and their shares; its streams, who has them since when, and their lag."""
    with Client(url) as client:
        name = _meant(client, service)
        found = fetch_service_state(client, name)
        shown = found.streams[:count]
        lags = _lags_of(client, name, [one.name for one in shown], group)
    if group is not None and shown and all(lag.count is None for lag in lags.values()):
        talk(f"none of these streams has a group {group!r}; millstream groups list STREAM shows those of a stream")
    if as_json:
        _say_json(found, shown, lags)
        return
    owned = sum(one.consumer is not None for one in found.streams)
    say(
        f"{counted(len(found.streams), 'stream')}: {owned:,} with an owner, {len(found.streams) - owned:,} free; "
        f"{found.unread:,} announced and not read yet, {counted(found.dead, 'dead letter')}"
    )
    if found.dead:
        talk(
            f"dead letters are announcements that cannot be read, and streams whose owners were lost too often: millstream tail "
            f"--no-follow '{ServiceKeys(name).dead}' shows why; millstream announce {service} STREAM shares a stream again"
        )
    now_ms = time.time() * 1000
    rows = [
        (
            visible(one.name),
            f"{one.streams:,}",
            "unreadable" if one.unreadable else f"{one.weight:g}",
            f"{one.limit:,}" if one.limit else "-",
            age(max(0.0, one.until_ms - now_ms)),
        )
        for one in found.consumers
    ]
    table(("consumer", ">streams", ">weight", ">limit", ">lease left"), rows)
    say("")
    table(
        ("stream", "state", "consumer", ">lease age", ">lag"),
        [_row(one, lags.get(one.name, _Lag()), now_ms) for one in shown],
    )
    for one in shown:
        if one.excluded_reason is not None:
            talk(f"{visible(one.name)} is left out for now, and tried again: {one.excluded_reason}")
    if len(found.streams) > count:
        talk(f"{len(found.streams) - count:,} more; --count shows them")


def _row(one: StreamState, lag: _Lag, now_ms: float) -> tuple[str, ...]:
    held_ms = None if one.since_ms is None else now_ms - one.since_ms
    behind = "-" if lag.count is None else f"{'' if lag.exact else '>'}{lag.count:,}"
    return clip(visible(one.name), _NAME_CHARS), _state(one), one.consumer or "-", age(held_ms), behind


def _state(one: StreamState) -> str:
    if one.unreadable:
        return "unreadable"
    if one.consumer is None:
        return "free"
    return "owned" if one.excluded_reason is None else "left out"


def _say_json(found: ServiceState, shown: Sequence[StreamState], lags: Mapping[str, _Lag]) -> None:
    consumers = [
        {
            "name": one.name, "streams": one.streams, "weight": one.weight, "limit": one.limit, "until_ms": one.until_ms,
            "unreadable": one.unreadable,
        }
        for one in found.consumers
    ]  # fmt: skip
    rows = [
        {
            "stream": one.name, "state": _state(one), "left_out": one.excluded_reason, "consumer": one.consumer, "since_ms": one.since_ms, "token": one.token,
            "lag": lags.get(one.name, _Lag()).count, "lag_exact": lags.get(one.name, _Lag()).exact,
        }
        for one in shown
    ]  # fmt: skip
    say_json(
        {
            "streams": len(found.streams),
            "unread": found.unread,
            "dead_letters": found.dead,
            "consumers": consumers,
            "shown": rows,
        }
    )


def _lags_of(client: Client, service: str, names: Sequence[str], group: str | None) -> Mapping[str, _Lag]:
    """Of each stream, how many entries wait for `group`, or for the handler whose workers share the streams."""
    label = client.execute("HGET", ServiceKeys(service).meta, "handler")
    if group is not None or label is None:
        counts = {name: _lag_in_group(client, name, group or service) for name in names}
        return {name: _Lag(count, exact=count is not None) for name, count in counts.items()}
    app, _, handler = from_wire(label).partition(".")
    found = []
    for name in names:
        with suppress(ConfigError):  # whoever has announced it, no handler can read it
            found.append(HandlerKeys(app, handler, name))
    try:
        return {one.stream: _Lag(one.lag, exact=one.lag_exact) for one in inspect_handlers(client, found)}
    except AccessDenied:
        return {}  # none of this user's


def _lag_in_group(client: Client, stream: str, group: str) -> int | None:
    try:
        return next((one.lag for one in groups_of(client, stream) if one.name == group), None)
    except (GroupMissing, WrongType, AccessDenied):
        return None  # there is no such stream yet, or it is none, or none of this user's


def announce(
    service: Service, names: Announced, info: Info = "null", url: Url = DEFAULT_URL, as_json: Json = False
) -> None:
    """Have the consumers of a service share more streams. To announce one again changes nothing."""
    try:
        about = json.loads(info)
    except ValueError as error:
        raise ConfigError(f"--info is not JSON ({error}); text needs quotes of its own, like '\"night\"'") from error
    wanted = [one for name in names for one in (_from_input() if name == "-" else [name])]
    with Client(url) as client:
        name: str | None = service
        with suppress(AccessDenied):  # who may not even ask may announce to the service of this very name
            name = _known(client, service)
        if name is None:
            talk(
                f"{service!r} is new here: somebody has to take part in it, or be announced=... to it. If it is a handler "
                "whose workers never ran, start them and announce again"
            )
        ids = announce_all(client, name or service, wanted, about)
    shown = ServiceKeys(name or service).label
    to = shown if shown == service else f"{shown}, where {service} listens"
    for stream, entry_id in zip(wanted, ids, strict=True):
        if as_json:
            say_json({"service": name or service, "stream": stream, "id": entry_id})
        else:
            say(f"{visible(stream)} is announced to {to}")


def _from_input() -> list[str]:
    """The lines of standard input. Names that are not UTF-8 are read as the command line gives them (PEP 383)."""
    return [from_wire(line) for line in sys.stdin.buffer.read().split(b"\n") if line]


def release(service: Service, names: Streams, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Take streams from whoever has them: somebody gets them at once, under a new token."""
    _end(service, names, "released", url, as_json=as_json)


def done(service: Service, names: Streams, yes: Yes = False, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Say that streams have no more to come: the service forgets them. Their entries stay."""
    confirm(f"{counted(len(names), 'stream')} of {service} will have no owner any more. Go on?", yes=yes)
    _end(service, names, "done", url, as_json=as_json)


def _end(service: str, names: Sequence[str], how: Literal["done", "released"], url: str, *, as_json: bool) -> None:
    with Client(url) as client:
        name = _meant(client, service)
        unknown = end_leases(client, name, how, names)
    ended = [one for one in names if one not in unknown]
    if as_json:
        say_json({"service": name, how: ended, "unknown": sorted(unknown)})
    for one in () if as_json else ended:
        say(f"{visible(one)} is {how}")
    if unknown:
        kind = MillstreamError if ended else ConfigError  # the latter says that nothing was done
        raise kind(
            f"{service} does not know {', '.join(map(repr, sorted(unknown)))}: not announced, not read yet, or done; "
            f"millstream streams {service} shows those it knows"
        )


def _meant(client: Client, service: str) -> str:
    """The service of this name, or that of the handler of this name. Raises ConfigError if there is neither, RedisError."""
    name = _known(client, service)
    if name is None:
        raise ConfigError(f"nothing was ever announced to {service!r} here; check the name, and --url")
    return name


def _known(client: Client, service: str) -> str | None:
    refusal: AccessDenied | None = None
    try:
        found = service_of(client, service)
    except AccessDenied as error:  # a user may have rights on one of the two
        found, refusal = None, error
    if found is not None:
        return found
    if client.execute("EXISTS", ServiceKeys(service).input):
        return service
    if refusal is not None:
        raise refusal
    return None
