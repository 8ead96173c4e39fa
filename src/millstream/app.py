"""App: a named set of handlers and stages, and its loading from a file or module."""

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

from millstream.errors import ConfigError, did_you_mean
from millstream.handlers.handler import Handler, HandlerOptions, compile_handler
from millstream.handlers.schedule import Missed, Schedule, compile_schedule
from millstream.handlers.stage import Rows, Stage, StageOptions, compile_stage
from millstream.model import Breaker, Limit, Retry
from millstream.redis_client.key_names import MASTER, check_identifier

F = TypeVar("F", bound=Callable[..., Any])

_UNEXPECTED = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")
_POLICIES = {one.__name__: one for one in (Retry, Breaker, Limit)}


class App:
    """A named set of handlers, which run unchanged on workers and on Spark, of stages, which are PySpark queries, and of
    schedules, which publish recurring messages.

        app = App("airline")

        @app.handler("flights", key="tailnum", retry=Retry(attempts=4), into="departures")
        def departure(flight: Flight, state: State) -> dict | None: ...

        @app.stage(Rows("departures", Departure), into="hours")
        def by_hour(departures: "DataFrame") -> "DataFrame": ...

    `name` is part of every Redis key of the app: letters, digits, '_' and '-'. Raises ConfigError.
    """

    def __init__(self, name: str) -> None:
        self.name = check_identifier("app name", name)
        if name == MASTER:
            raise ConfigError(f"the app name {MASTER!r} is reserved for `millstream master`: choose another")
        self.handlers: dict[str, Handler] = {}
        self.stages: dict[str, Stage] = {}
        self.schedules: dict[str, Schedule] = {}

    def handler(self, *streams: str, **options: Unpack[HandlerOptions]) -> Callable[[F], F]:
        """Register a function as the handler of `streams`.

        Annotations decide what each parameter receives: a typed model or Message (or lists of them, for batches), and
        State if the handler has a key. With a key, a list has consecutive messages of one key. The result, one mapping or an iterable of them, goes to the stream `into`.

        * `pattern`, `announced`: instead of `streams`, those that match the glob; or those announced to this service
        * `key`: the field, or a function of the Message, that orders its messages; None for no order (default)
        * `order`: "stream" keeps all messages of a stream in order, one at a time, with the stream's name as the key:
          workers then lease whole streams, one owner each. Default "key"
        * `missing_key`: a message without its key becomes a "dead-letter" (default), or is processed "unordered"
        * `into`: the stream that its results go to; None (default): a handler that returns something fails
        * `into_maxlen`: trim that stream to about so many entries; None for no trimming (default)
        * `retry`: how often and when failed messages are tried again, and what happens then. Default `Retry()`
        * `breaker`: pauses the handler when nearly all messages become dead letters for the same cause. Default
          `Breaker()`; None: nothing pauses it
        * `concurrency`: how many messages of different keys, or how many batches, an async handler processes at once in
          each worker process or Spark task. Default 100
        * `time_limit_ms`: an attempt that takes longer fails; milliseconds, at most a week. Default 300,000
        * `state_ttl_ms`: the state of a key expires so long after the last commit that changed it; milliseconds, at most
          ten years; None (default): never
        * `state_upcasts`: functions that bring a state from one version of the app to the next: the first from version 1 to
          2, and so on. A state that is stored in an earlier version passes those that it needs; the state of a later
          version is left alone, and its message waits. Default: none, which is version 1
        * `message_upcasts`: the same for messages, whose version is their field `schema_version` (1 without one); each
          takes the fields as `Message.fields` has them. A message that one fails on, or of a later version, becomes a
          dead letter. Streams and dead letters keep messages as they were published
        * `rate`: most messages a second of each stream, over all workers together; None for no limit (default)
        * `limit`: a `Limit`: how many messages run at once, or begin in a period, for each value of a field; over all
          workers and Spark tasks together. `Limit(rate=...)` alone is `rate`. Needs a key otherwise. Default: none
        * `batch_size`, `batch_wait_ms`: for handlers of lists: most messages in a list, up to 1,000 (default 100), and
          how long the first of them waits for more, in milliseconds up to 60,000 (default 0); with a key, since it was
          published
        * `partitions`: `streams` are bases, each created with so many partitions unless it exists already; None
          (default) for plain streams
        * `name`: its name in Redis, of its state, progress and dead letters; default: the function's

        Raises ConfigError with one line on what to change.
        """
        if len(streams) == 1 and callable(streams[0]):
            raise ConfigError('write @app.handler("stream", key="field"): a handler needs a stream to read')

        def register(function: F) -> F:
            compiled = compile_handler(self.name, function, streams, options)
            self._check_new(compiled.name)
            self.handlers[compiled.name] = compiled
            return function

        return register

    def stage(self, *inputs: "Rows | str | Callable[..., Any]", **options: Unpack[StageOptions]) -> Callable[[F], F]:
        """Register a function as a stage: a Spark query of its own, which runs beside the handlers and only on Spark.

        The function receives a streaming DataFrame for each of `inputs` (a stream's name stands for its `Rows`, a
        handler for the rows of its output stream). It returns a DataFrame, whose rows go to the stream `into` exactly
        once, or an unstarted DataStreamWriter with a destination. `name` defaults to the function's. Import pyspark
        inside the function. Raises ConfigError.
        """
        if (
            len(inputs) == 1
            and callable(inputs[0])
            and all(inputs[0] is not h.function for h in self.handlers.values())
        ):
            raise ConfigError('write @app.stage("orders"): a stage needs a stream, or a handler of this app, to read')

        def register(function: F) -> F:
            compiled = compile_stage(self.name, function, inputs, options, self.handlers)
            self._check_new(compiled.name)
            self.stages[compiled.name] = compiled
            return function

        return register

    def every(
        self,
        when: str,
        *,
        stream: str,
        timezone: str | None = None,
        missed: Missed = "once",
        name: str | None = None,
    ) -> Callable[[F], F]:
        """Register a function whose message is published to `stream` at each firing of a schedule, exactly once.

            @app.every("0 6 * * mon-fri", stream="reports", timezone="Europe/Berlin")
            def daily_report(time: datetime) -> dict: ...

        Workers and runs on Spark publish the firings of all schedules, also with `--only`. The function takes nothing,
        or the time of the firing in the schedule's time zone. It returns a mapping or model, or None for no message.
        Several processes may call it for one firing, so it should have no effects; one result is published.

        * `when`: a cron expression, `minute hour day-of-month month day-of-week`; or an interval such as "30s", "5m",
          "2h" or "1d", which fires whenever the Unix time is a multiple of it
        * `timezone`: of the cron expression, by its IANA name; None: UTC
        * `missed`: after a time without workers and runs, "once" publishes the last firing that was missed (default),
          "all" each of them in order, at most the last 1,000, and "skip" the last one if it is at most 60 seconds late
        * `name`: its name in Redis, of the record of its last firing; default: the function's

        The first start of a schedule, or of another `when` or `timezone`, fires nothing of the past. Raises ConfigError
        with one line on what to change.
        """

        def register(function: F) -> F:
            compiled = compile_schedule(
                self.name, function, when, stream=stream, timezone=timezone, missed=missed, name=name
            )
            if compiled.name in self.schedules:
                raise ConfigError(f'app {self.name!r} has two schedules named {compiled.name!r}; give one name="..."')
            self.schedules[compiled.name] = compiled
            return function

        return register

    def only(self, names: Collection[str]) -> "App":
        """Return this app reduced to the handlers and stages in `names`; all of them if empty. Raises ConfigError."""
        known = [*self.handlers, *self.stages]
        for name in names:
            if name not in known:
                raise ConfigError(f"app {self.name!r} has no handler or stage {name!r}; it has {', '.join(known)}")
        part = App(self.name)
        part.handlers = {name: one for name, one in self.handlers.items() if not names or name in names}
        part.stages = {name: one for name, one in self.stages.items() if not names or name in names}
        part.schedules = self.schedules
        return part

    def _check_new(self, name: str) -> None:
        if name in self.handlers or name in self.stages:
            raise ConfigError(f'app {self.name!r} has two handlers or stages named {name!r}; give one name="..."')


def load_app(target: str) -> App:
    """Load `module:attribute` or `path/to/file.py:attribute` (the attribute defaults to `app`).

    Adds the current folder, or the file's folder, to the import path, also for child processes: they import the app as
    a module, so the file must not share another module's name. Raises ConfigError with one line on what to change; for
    an error in the app's own code, the line names its file and line number.
    """
    location, _, attribute = target.rpartition(":") if ":" in target else (target, "", "app")
    attribute = attribute or "app"
    module = _load_module(location, target)
    found = getattr(module, attribute, None)
    if isinstance(found, App):
        if not found.handlers and not found.stages:
            raise ConfigError(
                f'app {found.name!r} in {location!r} has no handlers; add one with @app.handler("stream")'
            )
        return found
    apps = [name for name, value in vars(module).items() if isinstance(value, App)]
    hint = f"it has {', '.join(apps)}: use {location}:{apps[0]}" if apps else 'define one with app = App("name")'
    raise ConfigError(f"{location!r} has no App named {attribute!r}; {hint}")


def load_function(target: str) -> Callable[..., Any]:
    """Load the function `module:function` or `path/to/file.py:function`. Raises ConfigError as `load_app` does."""
    location, _, attribute = target.rpartition(":")
    if not location or not attribute:
        raise ConfigError(f"{target!r} does not name a function; use module:function or path/to/file.py:function")
    found = getattr(_load_module(location, target), attribute, None)
    if not callable(found):
        raise ConfigError(f"{location!r} has no function {attribute!r}")
    return cast(Callable[..., Any], found)


def app_folder(target: str) -> Path:
    """The folder that the app `target` adds to the import path."""
    location = _location(target)
    return Path(location).resolve().parent if location.endswith(".py") else Path.cwd()


def add_to_path(path: str) -> None:
    """Make `path` importable, here and in child processes: a module's file, a package's folder, or a zip.

    Raises ConfigError if it does not exist.
    """
    found = Path(path).resolve()
    if not (found.is_dir() or (found.is_file() and found.suffix in (".py", ".zip", ".egg"))):
        raise ConfigError(f"{path!r} must be an existing .py file, folder, .zip or .egg")
    _add_to_import_path(found if found.suffix in (".zip", ".egg") else found.parent)


def _location(target: str) -> str:
    return target.rpartition(":")[0] if ":" in target else target


def _load_module(location: str, target: str) -> Any:
    folder, module_name = app_folder(target), location
    if location.endswith(".py"):
        path = Path(location).resolve()
        if not path.is_file():
            raise ConfigError(
                f"file {location!r} does not exist; give the path of the app's file, like examples/airline.py:app"
            )
        _check_module_name(path)
        module_name = path.stem
    elif not location or location.startswith("."):  # Python takes it for a relative import
        raise ConfigError(
            f"{target!r} names neither a file nor a module: give path/to/file.py:app, or module:app from its folder"
        )
    _check_neighbours(folder)
    _add_to_import_path(folder)
    return _import(module_name, target)


def _check_module_name(path: Path) -> None:
    """Raise ConfigError if importing the file's name could load another module, in any process."""
    name = path.stem
    if "." in name or name.startswith("__"):
        raise ConfigError(f"{path.name!r} cannot be imported by its name, as Spark's workers must; rename it")
    if name in sys.stdlib_module_names:
        raise ConfigError(f"{path.name!r} would shadow Python's own module {name!r}; rename it")
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, created by hand
        return
    if found is not None and found.origin is not None and Path(found.origin).resolve() != path:
        raise ConfigError(f"{path.name!r} has the name of the module {name!r} in {found.origin!r}; rename it")


def _check_neighbours(folder: Path) -> None:
    """Raise ConfigError if a file beside the app has the name of a standard module: imports may find it instead, in any process."""
    shadowing = [path.name for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names]
    if shadowing:
        raise ConfigError(
            f"{sorted(shadowing)[0]!r}, beside the app, has the name of a module of Python, which imports would then find "
            "instead; rename it"
        )


def _add_to_import_path(folder: Path) -> None:
    text = str(folder)
    if text not in sys.path:
        sys.path.insert(0, text)
    inherited = os.environ.get("PYTHONPATH", "")
    if text not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = text + (os.pathsep + inherited if inherited else "")


def _import(module_name: str, target: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        if error.name == module_name or module_name.startswith(f"{error.name}."):
            raise ConfigError(
                f"module {module_name!r} not found; give module:app from its folder, or path/to/file.py:app"
            ) from error
        raise ConfigError(
            f"{target!r} needs the module {error.name!r}, which is not installed here{_place_of(error)}; install it, or "
            "correct the import"
        ) from error
    except SyntaxError as error:  # the place of the syntax error, in this file or one that it imports
        location = f"{error.filename}, line {error.lineno}"
        raise ConfigError(f"{target!r} cannot be imported: {type(error).__name__}: {error.msg} ({location})") from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything at import
        text = f"{type(error).__name__}: {error}{_place_of(error)}{_hint_of(error)}"
        raise ConfigError(f"{target!r} cannot be imported: {text}") from error


def _place_of(error: BaseException) -> str:
    """The file and line that raised an error, in parentheses; for a failed import those that import."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith("<frozen importlib") and file != importlib.__file__:
            place = f" ({file}, line {line})"
    return place


def _hint_of(error: BaseException) -> str:
    """Return the parameter of a policy that the misspelt one resembles, as the end of an error text."""
    found = _UNEXPECTED.match(str(error)) if isinstance(error, TypeError) else None
    policy = _POLICIES.get(found[1]) if found is not None else None
    if found is None or policy is None:
        return ""
    known = [one.name for one in fields(policy)]
    return f"; {did_you_mean(found[2], known, 'it has ' + ', '.join(known))}"
