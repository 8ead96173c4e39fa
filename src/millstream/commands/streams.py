"""`millstream streams`, `announce`, `release` and `done`: which consumer of a service has which stream."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Literal

import typer

from millstream.balancer import announce as announce_stream
from millstream.balancer.service import end_leases
from millstream.balancer.survey import ServiceState, StreamState, survey
from millstream.client import Client
from millstream.commands.options import DEFAULT_URL, Json, Url, Yes
from millstream.commands.terminal import age, clip, confirm, counted, say, say_json, table, talk
from millstream.errors import AccessDenied, ConfigError, GroupMissing, WrongType
from millstream.escaping import visible
from millstream.groups import groups_of
from millstream.naming import PREFIX, ServiceKeys

Service = Annotated[str, typer.Argument(help="The service that is announced to, or APP.HANDLER.", metavar="SERVICE")]
Stream = Annotated[str, typer.Argument(metavar="STREAM")]
Streams = Annotated[list[str], typer.Argument(metavar="STREAM...")]
Count = Annotated[int, typer.Option(min=1, help="Most streams to show, those that nobody has first.")]
Group = Annotated[str | None, typer.Option(help="The consumer group whose lag is shown; default: that of the handler.")]
Info = Annotated[str, typer.Option(help="What consumers are told of the stream, as JSON.")]

_NAME_CHARS = 60


def streams(
    service: Service, count: Count = 20, group: Group = None, url: Url = DEFAULT_URL, as_json: Json = False
) -> None:
    """Show a service's consumers and their shares; its streams, who has them since when, and their lag."""
    with Client(url) as client:
        name = _meant(client, service)
        found = survey(client, name)
        shown = found.streams[:count]
        lags = {one.name: _lag(client, one.name, group or name) for one in shown}
    if as_json:
        _say_json(found, shown, lags)
        return
    owned = sum(one.consumer is not None for one in found.streams)
    say(
        f"{counted(len(found.streams), 'stream')}: {owned:,} with an owner, {len(found.streams) - owned:,} free; "
        f"{found.unread:,} announced and not read yet, {found.dead:,} given up"
    )
    now_ms = time.time() * 1000
    rows = [
        (
            one.name,
            f"{one.streams:,}",
            f"{one.weight:g}",
            f"{one.limit:,}" if one.limit else "-",
            age(max(0.0, one.until_ms - now_ms)),
        )
        for one in found.consumers
    ]
    table(("consumer", ">streams", ">weight", ">limit", ">lease left"), rows)
    say("")
    table(("stream", "consumer", ">lease age", ">lag"), [_row(one, lags[one.name], now_ms) for one in shown])
    if len(found.streams) > count:
        talk(f"{len(found.streams) - count:,} more; --count shows them")


def _row(one: StreamState, lag: int | None, now_ms: float) -> tuple[str, ...]:
    held_ms = None if one.since_ms is None else now_ms - one.since_ms
    return clip(visible(one.name), _NAME_CHARS), one.consumer or "-", age(held_ms), "-" if lag is None else f"{lag:,}"


def _say_json(found: ServiceState, shown: Sequence[StreamState], lags: Mapping[str, int | None]) -> None:
    consumers = [
        {"name": one.name, "streams": one.streams, "weight": one.weight, "limit": one.limit, "until_ms": one.until_ms}
        for one in found.consumers
    ]
    rows = [
        {
            "stream": one.name, "consumer": one.consumer, "since_ms": one.since_ms, "token": one.token,
            "lag": lags[one.name],
        }
        for one in shown
    ]  # fmt: skip
    say_json(
        {
            "streams": len(found.streams),
            "unread": found.unread,
            "dead": found.dead,
            "consumers": consumers,
            "shown": rows,
        }
    )


def _lag(client: Client, stream: str, group: str) -> int | None:
    try:
        return next((one.lag for one in groups_of(client, stream) if one.name == group), None)
    except (GroupMissing, WrongType, AccessDenied):
        return None  # there is no such stream yet, or it is none, or none of this user's


def announce(
    service: Service, stream: Stream, info: Info = "null", url: Url = DEFAULT_URL, as_json: Json = False
) -> None:
    """Have the consumers of a service share one more stream. To announce it again changes nothing."""
    try:
        about = json.loads(info)
    except ValueError as error:
        raise ConfigError(f"--info is not JSON ({error}); text needs quotes of its own, like '\"night\"'") from error
    with Client(url) as client:
        name = service
        with suppress(AccessDenied):  # who may not even ask may announce to the service of this very name
            name = f"{PREFIX}:{service}" if _is_there(client, f"{PREFIX}:{service}") else service
        entry_id = announce_stream(client, name, stream, about)
    if as_json:
        say_json({"service": name, "stream": stream, "id": entry_id})
    else:
        say(f"{visible(stream)} is announced to {name}")


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
        raise ConfigError(
            f"{name} does not know {', '.join(map(repr, sorted(unknown)))}: not announced, not read yet, or done; "
            "millstream streams shows those it knows"
        )


def _is_there(client: Client, service: str) -> bool:
    return bool(client.execute("EXISTS", ServiceKeys(service).input))


def _meant(client: Client, service: str) -> str:
    """The service of this name, or that of the handler of this name. Raises ConfigError if there is neither, RedisError."""
    refusal: AccessDenied | None = None
    for name in (f"{PREFIX}:{service}", service):
        try:
            if _is_there(client, name):
                return name
        except AccessDenied as error:  # a user may have rights on one of the two
            refusal = error
    if refusal is not None:
        raise refusal
    raise ConfigError(f"nothing was ever announced to {service!r} here; check the name, and --url")
