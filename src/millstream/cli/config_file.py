"""Config: options of a command from a TOML file, for commands started by a service manager."""

import importlib.util
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from millstream.errors import ConfigError, install_hint


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Use the file's values as defaults; the command line and the environment take precedence."""
    if path is None or context.resilient_parsing:
        return path
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the file {str(path)!r}: {error}") from error
    known = {parameter.name for parameter in context.command.params}
    for name in values.keys() - known:
        raise ConfigError(f"{path}: unknown option {name!r}; use {', '.join(sorted(filter(None, known)))}")
    context.default_map = {**(context.default_map or {}), **values}
    return path


Config = Annotated[
    Path | None,
    typer.Option("--config", callback=_read, is_eager=True, help="TOML file with these options, like ticket_stream."),
]


def require_modules(extra: str, *modules: str) -> None:
    """Raise ConfigError if a module of an optional extra is not installed."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"this needs {name}, which is not installed; {install_hint(extra)}")
