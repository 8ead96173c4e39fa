"""Handlers as operators name them: `APP.HANDLER`, or `APP` for all handlers of an app."""

from collections.abc import Iterable, Sequence

from millstream.admin.inspection import find_handlers
from millstream.errors import AccessDenied, ConfigError, MillstreamError, did_you_mean
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, check_identifier

_MAX_NAMED = 5
_MAX_COMPARED = 1_000
"""How many names an unknown one is compared with: each takes some microseconds."""


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
    return _on_stream(name, [one for one in known if (one.app, one.handler) == (app, handler)], stream, known)


def select_handlers(client: Client, name: str | None, stream: str | None) -> list[HandlerKeys]:
    """All handlers, those of an app, or one handler, on each of their streams or on `stream`; raises as above.

    Without a name it is no error that none has run.
    """
    known = find_handlers(client)
    if name is None:
        return [one for one in known if stream in (None, one.stream)]
    app, handler = split_name(name)
    return _on_stream(name, [one for one in known if one.app == app and handler in (None, one.handler)], stream, known)


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


def unknown_app(client: Client, app: str) -> str:
    """An error text: nothing of `app` has run. It names what may have been meant. Raises RedisError."""
    try:
        known = find_handlers(client)
    except AccessDenied:  # to all of them
        known = []
    names = {one.app for one in known}
    hint = _similar(app, names)
    if (found := app.partition(".")[0]) in names:
        hint = f"give the name of an app alone: {found}"
    elif labels := _labels_of(app, known):
        hint = f"the app of {' and '.join(labels)} is {' or '.join(one.partition('.')[0] for one in labels)}"
    return f"no handler or stage of an app named {app!r} has run on this Redis; {hint}"


def _on_stream(
    name: str, named: Sequence[HandlerKeys], stream: str | None, known: Sequence[HandlerKeys]
) -> list[HandlerKeys]:
    found = [one for one in named if stream in (None, one.stream)]
    if not found:
        what = f"handler {name!r}" if "." in name else f"handler of an app {name!r}"
        if stream is not None and named:
            where, hint = f"on {stream!r}", _similar(stream, {one.stream for one in named})
        else:
            where, hint = "on this Redis", _similar(name, {one.label if "." in name else one.app for one in known})
            if labels := _labels_of(name, known):
                hint = f"write {' or '.join(labels)}"
        raise MillstreamError(f"no {what} has run {where}; {hint}")
    return found


def _labels_of(handler: str, known: Sequence[HandlerKeys]) -> list[str]:
    """Some handlers of this name, with their apps."""
    return sorted({one.label for one in known if one.handler == handler})[:_MAX_NAMED]


def _similar(name: str, names: Iterable[str]) -> str:
    return did_you_mean(name, sorted(names)[:_MAX_COMPARED], "millstream info shows those that have")
