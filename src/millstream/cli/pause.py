"""`millstream pause` and `millstream resume`: stops and resumes reading by a handler's workers."""

from collections.abc import Sequence
from typing import Annotated

import typer

from millstream.admin.inspection import find_handlers
from millstream.cli.options import DEFAULT_URL, Json, Url
from millstream.cli.terminal import print_json, print_line
from millstream.delivery.commit_store import CommitStore
from millstream.errors import ConfigError
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import HandlerKeys

Name = Annotated[str, typer.Argument(help="The handler: its name, or app.handler.", metavar="HANDLER")]
Stream = Annotated[str | None, typer.Option(help="Only on this stream; default: all on which it has run.")]


def pause(handler: Name, stream: Stream = None, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Stop a handler's workers from reading new messages until `resume`. They finish the messages in flight."""
    _set(handler, stream, url, paused=True, as_json=as_json)


def resume(handler: Name, stream: Stream = None, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Resume a paused handler."""
    _set(handler, stream, url, paused=False, as_json=as_json)


def _set(name: str, stream: str | None, url: str, *, paused: bool, as_json: bool) -> None:
    with Client(url) as client:
        found = resolve_handler(find_handlers(client), name, stream)
        CommitStore(client, app=found[0].app, handler=found[0].handler).set_paused(
            [one.stream for one in found], paused=paused
        )
    if as_json:
        streams = [one.stream for one in found]
        print_json({"app": found[0].app, "handler": found[0].handler, "streams": streams, "paused": paused})
        return
    for one in found:
        print_line(f"{one.app}.{one.handler} is {'paused' if paused else 'resumed'} on {escape(one.stream)}")


def resolve_handler(known: Sequence[HandlerKeys], name: str, stream: str | None) -> list[HandlerKeys]:
    """The handler of this name, on each of its streams. Raises ConfigError if there is none, or more than one."""
    named = [one for one in known if name in (one.handler, f"{one.app}.{one.handler}")]
    apps = sorted({one.app for one in named})
    if len(apps) > 1:
        raise ConfigError(f"several apps have a handler {name!r}, {' and '.join(apps)}: write {apps[0]}.{name}")
    found = [one for one in named if stream in (None, one.stream)]
    if not found:
        where = f" on {stream!r}" if named and stream is not None else " on this Redis"
        raise ConfigError(f"no handler {name!r} has run{where}; millstream info shows those that have")
    return found
