"""Options of a command from a TOML file, for commands that are started by machines."""

import importlib.util
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from millstream.errors import ConfigError


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Take the file's values for options that are not given; what the command line or the environment says goes first."""
    if path is None or context.resilient_parsing:
        return path
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the file {str(path)!r} cannot be read: {error}") from error
    known = {parameter.name for parameter in context.command.params}
    for name in values.keys() - known:
        raise ConfigError(
            f"{path}: there is no option {name!r}; write them as {', '.join(sorted(filter(None, known)))}"
        )
    context.default_map = {**(context.default_map or {}), **values}
    return path


Config = Annotated[
    Path | None,
    typer.Option("--config", callback=_read, is_eager=True, help="TOML file with these options, like ticket_stream."),
]


def needs(extra: str, *modules: str) -> None:
    """Raise ConfigError if a module of an optional part is not installed."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"this needs {name}, which is not installed: pip install 'millstream[{extra}]'")
