"""Stage: an ordinary PySpark query over the rows of streams, declared in the same app as the handlers.

Nothing here imports pyspark: workers load the same app file. `spark/run/stage_query.py` checks the query it returns.
"""

import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypedDict

from millstream.errors import ConfigError, did_you_mean
from millstream.handlers.decoding import wire_types
from millstream.handlers.handler import Handler, check_streams, is_plain, name_of_function


class StageOptions(TypedDict, total=False):
    """The options of `App.stage`, which says what each means."""

    into: str | None
    name: str


OPTIONS = tuple(StageOptions.__annotations__)

_RUN_OPTIONS = (
    "url",
    "subscribe",
    "subscribepattern",
    "group",
    "layout",
    "keyfield",
    "committedapp",
    "committedhandler",
)


@dataclass(frozen=True)
class Rows:
    """One input of a stage: the streams that it reads as one streaming DataFrame.

    * `streams`: a stream, or several; or a handler of the same app, which stands for its output stream
    * `schema`: the columns: text such as "customer string, amount double", a StructType, or a model as handlers take
      them; None for the source's own columns, with all fields in one
    * `pattern`: instead of `streams`, all streams that match the glob, new ones included
    * `options`: of the source, like {"maxOffsetsPerTrigger": 1000}; they override the run's
    """

    streams: str | Sequence[str] | Callable[..., Any] = ()
    schema: Any = None
    _: KW_ONLY
    pattern: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Input:
    """Rows after the check, with the names of the streams."""

    streams: tuple[str, ...]
    pattern: str | None
    schema: Any
    options: Mapping[str, object]

    def reads(self, stream: str) -> bool:
        """True if the input reads `stream`."""
        return stream in self.streams or (self.pattern is not None and fnmatch.fnmatchcase(stream, self.pattern))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of an app.

    * `app`, `name`: together they name its checkpoint and the group that shows its progress
    * `function`: takes a streaming DataFrame for each of `inputs`; returns a DataFrame or an unstarted DataStreamWriter
    * `into`: the stream that the rows go to; None if the function returns a writer
    """

    app: str
    name: str
    function: Callable[..., Any]
    inputs: tuple[Input, ...]
    into: str | None = None

    @property
    def label(self) -> str:
        """`app.stage`, its name in logs and errors."""
        return f"{self.app}.{self.name}"


def compile_stage(
    app: str,
    function: Callable[..., Any],
    inputs: Sequence[object],
    options: Mapping[str, Any],
    handlers: Mapping[str, Handler],
) -> Stage:
    """Check a stage once, when its app is loaded. Raises ConfigError with one line on what to change."""
    name = name_of_function("stage", function, options.get("name"))
    where = f"stage {name!r}"
    for unknown in options.keys() - set(OPTIONS):
        hint = did_you_mean(unknown, OPTIONS, f"known options: {', '.join(OPTIONS)}")
        raise ConfigError(f"{where}: unknown option {unknown!r}; {hint}")
    found = tuple(_input(where, one, handlers) for one in inputs)
    if not found:
        raise ConfigError(f'{where} needs an input, like @app.stage(Rows("orders", Order))')
    named = [stream for one in found for stream in one.streams]
    if len(set(named)) < len(named):
        raise ConfigError(f"{where}: a stream is named twice; name it once, and use the DataFrame twice")
    into = options.get("into")
    if into is not None and not (isinstance(into, str) and into):
        raise ConfigError(f"{where}: into must be the name of a stream")
    if into is not None and any(one.reads(into) for one in found):
        raise ConfigError(f"{where}: it would read its own output: into={into!r} is one of its streams; rename one")
    _check_function(where, function, len(found))
    return Stage(app=app, name=name, function=function, inputs=found, into=into)


def _input(where: str, declared: object, handlers: Mapping[str, Handler]) -> Input:
    rows = declared if isinstance(declared, Rows) else Rows(declared)  # type: ignore[arg-type]  # checked below
    streams = rows.streams
    if callable(streams):
        names: tuple[str, ...] = (_output(where, streams, handlers),)
    else:
        names = (streams,) if isinstance(streams, str) else tuple(streams) if isinstance(streams, Sequence) else ()
    if bool(names) == bool(rows.pattern):
        raise ConfigError(
            f'{where}: each input is a stream\'s name, or Rows("orders", ...), or Rows(pattern="orders.*")'
        )
    check_streams(where, names)
    for option in rows.options:
        if option.lower() in _RUN_OPTIONS:
            raise ConfigError(f"{where}: the run sets the option {option} of its rows; leave it out")
    if isinstance(rows.schema, type):
        try:
            wire_types(rows.schema)
        except ConfigError as error:
            raise ConfigError(f"{where}: the schema of {' and '.join(names) or rows.pattern}: {error}") from error
    return Input(streams=names, pattern=rows.pattern, schema=rows.schema, options=rows.options)


def _output(where: str, function: Callable[..., Any], handlers: Mapping[str, Handler]) -> str:
    """Return the output stream of the handler `function`."""
    handler = next((one for one in handlers.values() if one.function is function), None)
    name = getattr(function, "__name__", repr(function))
    if handler is None:
        raise ConfigError(
            f'{where}: {name!r} is not a handler of this app; name a stream, like @app.stage(Rows("orders", Order))'
        )
    if handler.into is None:
        raise ConfigError(f'{where}: the handler {name!r} has no output stream; give it into="stream"')
    return handler.into


def _check_function(where: str, function: Callable[..., Any], count: int) -> None:
    if not is_plain(function):
        raise ConfigError(f"{where} must be a plain function: it is called once, to describe a query")
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError as error:
        raise ConfigError(
            f"{where} has {count} input{'s' if count > 1 else ''}: give it a parameter for the DataFrame of each: {error}"
        ) from error
