"""Handlers as operators name them: `APP.HANDLER`, or `APP` for all handlers of an app."""

from collections.abc import Sequence

from millstream.admin.inspection import find_handlers
from millstream.errors import ConfigError, MillstreamError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, check_identifier

_MAX_NAMED = 5


def split_name(name: str) -> tuple[str, str | None]:
    """The app, and the handler unless `name` is an app alone. Raises ConfigError for what can name neither."""
    app, dot, handler = name.partition(".")
    check_identifier("app", app)
    return app, check_identifier("handler", handler) if dot else None


def find_handler(
    client: Client, name: str, stream: str | None, *, known: Sequence[HandlerKeys] | None = None
) -> list[HandlerKeys]:
    """The handler `APP.HANDLER` on each of its streams, or on `stream`. `known`: what `find_handlers` has found before.

    Raises ConfigError if the name is none, MillstreamError if it has not run there, and RedisError.
    """
    app, handler = split_name(name)
    known = find_handlers(client) if known is None else known
    if handler is None:
        near = sorted({one.label for one in known if name in (one.handler, one.app)})
        raise ConfigError(f"{name!r} is not APP.HANDLER: write {' or '.join(near[:_MAX_NAMED]) or 'both names'}")
    return _on_stream(name, [one for one in known if (one.app, one.handler) == (app, handler)], stream)


def select_handlers(client: Client, name: str | None, stream: str | None) -> list[HandlerKeys]:
    """All handlers, those of an app, or one handler, on each of their streams or on `stream`; raises as above.

    Without a name it is no error that none has run.
    """
    known = find_handlers(client)
    if name is None:
        return [one for one in known if stream in (None, one.stream)]
    app, handler = split_name(name)
    return _on_stream(name, [one for one in known if one.app == app and handler in (None, one.handler)], stream)


def handler_on(client: Client, name: str, stream: str | None) -> HandlerKeys:
    """The handler `APP.HANDLER` on `stream`; on the only one that it has run on if `stream` is None.

    Raises ConfigError if there are several and none is given, else as `find_handler`.
    """
    app, handler = split_name(name)
    if handler is not None and stream is not None:
        return HandlerKeys(app, handler, stream)
    found = find_handler(client, name, stream)
    if len(found) > 1:
        names = ", ".join(repr(one.stream) for one in found[:_MAX_NAMED]) + (", ..." if found[_MAX_NAMED:] else "")
        raise ConfigError(f"{name} runs on {len(found):,} streams: add --stream and one of {names}")
    return found[0]


def _on_stream(name: str, named: list[HandlerKeys], stream: str | None) -> list[HandlerKeys]:
    found = [one for one in named if stream in (None, one.stream)]
    if not found:
        what = f"handler {name!r}" if "." in name else f"handler of an app {name!r}"
        where = f"on {stream!r}" if named else "on this Redis"
        raise MillstreamError(f"no {what} has run {where}; millstream info shows those that have")
    return found
