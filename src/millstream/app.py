"""An app: a named set of handlers and stages, and how to load it from a file or module."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar, cast

from millstream.errors import ConfigError
from millstream.handlers.handler import Handler, compile_handler
from millstream.handlers.stage import Rows, Stage, compile_stage
from millstream.redis_client.key_names import MASTER, check_identifier

F = TypeVar("F", bound=Callable[..., Any])


class App:
    """A named set of handlers that run on a worker or on Spark, unchanged, and of stages, which are PySpark's own.

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
            raise ConfigError(f"the app name {MASTER!r} is taken by `millstream master`: give the app another")
        self.handlers: dict[str, Handler] = {}
        self.stages: dict[str, Stage] = {}

    def handler(self, *streams: str, **options: Any) -> Callable[[F], F]:
        """Register a function as the handler of `streams`. Options as in `millstream.handlers.handler.Handler`.

        Its parameters are filled by their annotations: a typed model or Message (or lists of
        them, for batches), and State if it has a key.
        What it returns, one mapping or an iterable of them, goes to the stream `into`. Raises ConfigError.
        """
        if len(streams) == 1 and callable(streams[0]):
            raise ConfigError('write @app.handler("stream", key="field"): a handler needs the stream that it reads')

        def register(function: F) -> F:
            compiled = compile_handler(self.name, function, streams, options)
            self._check_new(compiled.name)
            self.handlers[compiled.name] = compiled
            return function

        return register

    def stage(self, *inputs: "Rows | str | Callable[..., Any]", **options: Any) -> Callable[[F], F]:
        """Register a function as a stage: a Spark query of its own, beside the handlers, that only Spark can run.

        The function is given a streaming DataFrame for each of `inputs` (a stream's name stands for its `Rows`, a handler
        for those of its output), and returns what they become: a DataFrame, whose rows go to the stream `into` exactly
        once, or a DataStreamWriter, not started, that says where they go. `name` is that of the function if not given.
        Import pyspark inside the function. Raises ConfigError.
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

    def only(self, names: Collection[str]) -> "App":
        """This app with no handlers and stages but those of `names`; all of them if it is empty. Raises ConfigError."""
        known = [*self.handlers, *self.stages]
        for name in names:
            if name not in known:
                raise ConfigError(f"app {self.name!r} has no handler or stage {name!r}; it has {', '.join(known)}")
        part = App(self.name)
        part.handlers = {name: one for name, one in self.handlers.items() if not names or name in names}
        part.stages = {name: one for name, one in self.stages.items() if not names or name in names}
        return part

    def _check_new(self, name: str) -> None:
        if name in self.handlers or name in self.stages:
            raise ConfigError(f'app {self.name!r} has two handlers or stages named {name!r}; give one name="..."')


def load_app(target: str) -> App:
    """Load `module:attribute` or `path/to/file.py:attribute` (the attribute defaults to `app`).

    The current folder, or the file's own, is put on the import path, of child processes too: they import the app as
    a module, so a file must not be named like another module. Raises ConfigError with one line on what to change; an
    error inside the app's own code is named with its file and line.
    """
    place, _, attribute = target.rpartition(":") if ":" in target else (target, "", "app")
    attribute = attribute or "app"
    module = _module(place, target)
    found = getattr(module, attribute, None)
    if isinstance(found, App):
        if not found.handlers and not found.stages:
            raise ConfigError(f'app {found.name!r} in {place!r} has no handlers; add one with @app.handler("stream")')
        return found
    apps = [name for name, value in vars(module).items() if isinstance(value, App)]
    hint = f"it has {', '.join(apps)}: use {place}:{apps[0]}" if apps else 'define one with app = App("name")'
    raise ConfigError(f"{place!r} has no App named {attribute!r}; {hint}")


def load_function(target: str) -> Callable[..., Any]:
    """Load the function `module:function` or `path/to/file.py:function`. Raises ConfigError as `load_app` does."""
    place, _, attribute = target.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"{target!r} names no function; give module:function, or path/to/file.py:function")
    found = getattr(_module(place, target), attribute, None)
    if not callable(found):
        raise ConfigError(f"{place!r} has no function {attribute!r}")
    return cast(Callable[..., Any], found)


def app_folder(target: str) -> Path:
    """The folder that is put on the import path for the app `target`."""
    place = _place(target)
    return Path(place).resolve().parent if place.endswith(".py") else Path.cwd()


def add_to_path(path: str) -> None:
    """Make what `path` is importable, here and in child processes: a module's file, a package's folder, or a zip.

    Raises ConfigError if there is none.
    """
    found = Path(path).resolve()
    if not (found.is_dir() or (found.is_file() and found.suffix in (".py", ".zip", ".egg"))):
        raise ConfigError(f"{path!r} is no .py file, folder, .zip or .egg that is there")
    _put_on_path(found if found.suffix in (".zip", ".egg") else found.parent)


def _place(target: str) -> str:
    return target.rpartition(":")[0] if ":" in target else target


def _module(place: str, target: str) -> Any:
    folder, module_name = app_folder(target), place
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise ConfigError(
                f"there is no file {place!r}; give the path of the app's file, like examples/airline.py:app"
            )
        _check_module_name(path)
        module_name = path.stem
    _check_neighbours(folder)
    _put_on_path(folder)
    return _import(module_name, target)


def _check_module_name(path: Path) -> None:
    """Raise ConfigError if the file's own name does not lead every process to this file."""
    name = path.stem
    if "." in name or name.startswith("__"):
        raise ConfigError(f"{path.name!r} cannot be imported by its name, which Spark's workers do; rename it")
    if name in sys.stdlib_module_names:
        raise ConfigError(
            f"{path.name!r} would stand in for Python's own module {name!r} in Spark's workers; rename it"
        )
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # a module that was made by hand
        return
    if found is not None and found.origin is not None and Path(found.origin).resolve() != path:
        raise ConfigError(f"{path.name!r} is named like the module {name!r} in {found.origin!r}; rename it")


def _check_neighbours(folder: Path) -> None:
    """Raise ConfigError if a file beside the app would stand in for a module of Python's own, in every process."""
    hiding = [path.name for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names]
    if hiding:
        raise ConfigError(
            f"{sorted(hiding)[0]!r}, beside the app, would stand in for Python's own module in Spark's workers; rename it"
        )


def _put_on_path(folder: Path) -> None:
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
                f"there is no module {module_name!r} here; give module:app from its folder, or path/to/file.py:app"
            ) from error
        raise ConfigError(f"{target!r} needs the module {error.name!r}, which is not installed here") from error
    except SyntaxError as error:  # its own place, not that of the import: of that file, or of one that it imports
        place = f"{error.filename}, line {error.lineno}"
        raise ConfigError(f"{target!r} cannot be imported: {type(error).__name__}: {error.msg} ({place})") from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything at import
        traceback = error.__traceback__
        line = ""
        while traceback is not None:
            line = f" ({traceback.tb_frame.f_code.co_filename}, line {traceback.tb_lineno})"
            traceback = traceback.tb_next
        raise ConfigError(f"{target!r} cannot be imported: {type(error).__name__}: {error}{line}") from error
