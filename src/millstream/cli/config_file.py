"""Settings of commands from the environment and a TOML file: flag > environment > file > default."""

import importlib.util
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperOption

from millstream.cli.options import parameters_of
from millstream.cli.terminal import print_message
from millstream.errors import ConfigError, did_you_mean, install_hint

_DEFAULT_FILE = Path("millstream.toml")
_PREFIX = "MILLSTREAM_"
_VARIABLE = "MILLSTREAM_CONFIG"
_COMMON = (_VARIABLE, "MILLSTREAM_DEBUG")
_SIMILAR = 0.75
_COMMAND_LINE_ONLY = ("--help", "--config", "--yes")
"""`--yes` answers a question that this very command asks: neither a file nor the environment may."""


def add_settings(command: Any, path: Sequence[str]) -> None:
    """Let each option of a command, or of those below it, come from the environment and from a file.

    The option --claim of `millstream worker` is MILLSTREAM_WORKER_CLAIM, and `claim` in the section [worker]; the option
    --limit of `millstream key list` is MILLSTREAM_KEY_LIST_LIMIT, and `limit` in [key.list].
    """
    for name, one in getattr(command, "commands", {}).items():
        add_settings(one, (*path, name))
    if hasattr(command, "commands"):
        return
    names = {_long_name(one).removeprefix("--").replace("-", "_"): one for one in command.params if _is_setting(one)}
    for name, option in names.items():
        if option.envvar is None:
            option.envvar = "_".join(("millstream", *path, name)).replace("-", "_").upper()
            option.show_envvar = False  # the help of each option would say it; the page of commands says it once
    parameters = {name: option.name for name, option in names.items()}
    variables = [name for option in names.values() for name in _as_list(option.envvar)]
    command.params.append(_config_option(path, parameters, variables))


def _config_option(path: Sequence[str], parameters: Mapping[str, str], variables: Sequence[str]) -> Any:
    def read(context: typer.Context, file: str | None) -> None:
        if context.resilient_parsing:
            return
        commands = getattr(context.find_root().command, "commands", {})
        _warn_of_misspelt(path, variables, commands)
        if file:
            context.meta[_VARIABLE] = str(Path(file).resolve())
        if file or _DEFAULT_FILE.is_file():
            context.default_map = _read(Path(file or _DEFAULT_FILE), path, parameters, commands)

    def options(
        config: Annotated[
            str | None,
            typer.Option(
                "--config",
                callback=read,
                is_eager=True,
                expose_value=False,
                envvar=_VARIABLE,
                metavar="FILE",
                help="TOML file with options; default: millstream.toml here, if it exists.",
            ),
        ] = None,
    ) -> None: ...

    return parameters_of(options)[0]


def chosen_file(context: typer.Context) -> Mapping[str, str]:
    """The environment by which a child process reads the file that --config of this command has chosen."""
    return {_VARIABLE: context.meta[_VARIABLE]} if _VARIABLE in context.meta else {}


def _warn_of_misspelt(path: Sequence[str], variables: Sequence[str], commands: Iterable[str]) -> None:
    """Print a warning for each variable of the environment that is almost one of `variables`.

    Others may be of another command or program: Kubernetes sets MILLSTREAM_SERVICE_HOST for a service of that name.
    """
    others = tuple(f"{_PREFIX}{name.upper()}_" for name in commands)
    own = "_".join(("millstream", *path, "")).replace("-", "_").upper()
    common = {*_COMMON, *(one for one in variables if not one.startswith(own))}
    settings = {*variables, *common}
    for name in sorted(os.environ):
        first, _, rest = name.partition("_")
        meant = f"{_PREFIX}{rest}"
        if name != meant in settings and get_close_matches(first, ["MILLSTREAM"], n=1, cutoff=_SIMILAR):
            print_message(f"warning: the environment variable {name} has no effect; did you mean {meant}?")
    for name in sorted(os.environ.keys() - settings):
        if not name.startswith(own) and (not name.startswith(_PREFIX) or name.startswith(others)):
            continue
        prefix = own if name.startswith(own) else _PREFIX
        known = [one.removeprefix(prefix) for one in (variables if prefix == own else common) if one.startswith(prefix)]
        similar = get_close_matches(name.removeprefix(prefix), known, n=1, cutoff=_SIMILAR)
        similar += [one for one in known if name.endswith(f"_{one}") or sorted(name) == sorted(f"{prefix}{one}")]
        if similar:
            print_message(f"warning: the environment variable {name} has no effect; did you mean {prefix}{similar[0]}?")


def _is_setting(parameter: Any) -> bool:
    return isinstance(parameter, TyperOption) and _long_name(parameter) not in _COMMAND_LINE_ONLY


def _long_name(option: Any) -> str:
    return next((one for one in option.opts if one.startswith("--")), "")


def _as_list(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _read(file: Path, path: Sequence[str], parameters: Mapping[str, str], commands: Collection[str]) -> dict[str, Any]:
    try:
        values: Any = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigError(f"cannot read the file {str(file)!r}: {reason}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the file {str(file)!r}: {error}") from error
    for name in values.keys() - {"url", *commands} if commands else ():
        hint = did_you_mean(name, {"url", *commands}, "use url, or a section with the name of a command")
        raise ConfigError(f"{file}: unknown section {name!r}; {hint}")
    common = {"url": values["url"]} if "url" in values and "url" in parameters else {}
    for name in path:
        values = values.get(name, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: {name!r} must be a section: [{'.'.join(path)}]")
    for name in values.keys() - parameters.keys():
        hint = did_you_mean(name, parameters, f"use {', '.join(sorted(parameters))}")
        raise ConfigError(f"{file}: unknown option {name!r} in [{'.'.join(path)}]; {hint}")
    return {parameters[name]: value for name, value in {**common, **values}.items()}


def require_modules(extra: str, *modules: str) -> None:
    """Raise ConfigError if a module of an optional extra is not installed."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"this needs {name}, which is not installed; {install_hint(extra)}")
