"""An app: a named set of handlers, and how to load it from a file or module."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from millstream.errors import ConfigError
from millstream.handlers import Handler, compile_handler
from millstream.naming import MASTER, check_identifier

F = TypeVar("F", bound=Callable[..., Any])


class App:
    """A named set of handlers that run on a worker or on Spark, unchanged.

        app = App("airline")

        @app.handler("flights", key="tailnum", retry=Retry(attempts=4), into="departures")
        def departure(flight: Flight, state: State) -> dict | None: ...

    `name` is part of every Redis key of the app: letters, digits, '_' and '-'. Raises ConfigError.
    """

    def __init__(self, name: str) -> None:
        self.name = check_identifier("app name", name)
        if name == MASTER:
            raise ConfigError(f"the app name {MASTER!r} is taken by `millstream master`: give the app another")
        self.handlers: dict[str, Handler] = {}

    def handler(self, *streams: str, **options: Any) -> Callable[[F], F]:
        """Register a function as the handler of `streams`. Options as in `millstream.handlers.Handler`.

        Its parameters are filled by their annotations: a typed model or Message (or lists of
        them, for batches), and State if it has a key.
        What it returns, one mapping or an iterable of them, goes to the stream `into`. Raises ConfigError.
        """
        if len(streams) == 1 and callable(streams[0]):
            raise ConfigError('write @app.handler("stream", key="field"): a handler needs the stream that it reads')

        def register(function: F) -> F:
            compiled = compile_handler(self.name, function, streams, options)
            if compiled.name in self.handlers:
                raise ConfigError(f'app {self.name!r} has two handlers named {compiled.name!r}; give one name="..."')
            self.handlers[compiled.name] = compiled
            return function

        return register


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
        if not found.handlers:
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


def _module(place: str, target: str) -> Any:
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise ConfigError(
                f"there is no file {place!r}; give the path of the app's file, like examples/airline.py:app"
            )
        _check_module_name(path)
        folder, module_name = path.parent, path.stem
    else:
        folder, module_name = Path.cwd(), place
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
    except (Exception, SystemExit) as error:  # the user's module may raise anything at import
        traceback = error.__traceback__
        line = ""
        while traceback is not None:
            line = f" ({traceback.tb_frame.f_code.co_filename}, line {traceback.tb_lineno})"
            traceback = traceback.tb_next
        raise ConfigError(f"{target!r} cannot be imported: {type(error).__name__}: {error}{line}") from error
