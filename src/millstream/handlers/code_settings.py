"""The settings of a handler as text, and a short name of the code that it runs, for operators."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from millstream.handlers.handler import OPTIONS, Handler
from millstream.redis_client.escaping import escape

_MOST_STREAMS = 10


def settings_of(handler: Handler) -> dict[str, str]:
    """Return the settings of a handler that are set, by the names of `App.handler`, as short text.

    Functions are shown by their names, and lists of functions by their number.
    """
    shown = ", ".join(handler.streams[:_MOST_STREAMS])
    more = f" and {len(handler.streams) - _MOST_STREAMS:,} more" if len(handler.streams) > _MOST_STREAMS else ""
    named = {"streams": shown + more, **{name: _text(getattr(handler, name)) for name in OPTIONS}}
    if not handler.in_batches:
        del named["batch_size"], named["batch_wait_ms"]
    return {name: escape(text) for name, text in named.items() if text and name != "name"}


def source_of(function: Callable[..., Any]) -> str:
    """Return the file of a function and a digest of that file, which differs between versions; "" if it has no file."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(function))
        source = Path(path).read_bytes() if path else None
    except (OSError, TypeError):
        return ""
    return f"{escape(Path(path or '').name)} {blake2b(source, digest_size=4).hexdigest()}" if source is not None else ""


def _text(value: Any) -> str:
    if value is None:
        return ""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return ", ".join(f"{name}={_text(one)}" for name, one in found.items() if one is not None)
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    if isinstance(value, float):
        return f"{value:,g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{len(value)}" if value else ""
    return f"{value:,}" if isinstance(value, int) else str(value)
