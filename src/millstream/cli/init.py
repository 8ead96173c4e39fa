"""`millstream init`: writes a starter project that runs and has a test."""

import shlex
from itertools import chain, count
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli.options import Json
from millstream.cli.starter_project import FILES
from millstream.cli.terminal import print_json, print_line, print_message
from millstream.errors import ConfigError

_HERE = Path()


def init(
    folder: Annotated[
        Path, typer.Argument(help="The folder; created if need be. Default: the current one.", metavar="[FOLDER]")
    ] = _HERE,
    as_json: Json = False,
) -> None:
    """Write a starter project: an app with a keyed handler, its test, settings, and a README with the commands.

    Overwrites nothing: if one of its files exists, none is written.
    """
    existing = [name for name in FILES if (folder / name).exists() or (folder / name).is_symlink()]
    if existing:
        raise ConfigError(
            f"{', '.join(str(folder / name) for name in existing)}: no file that exists is overwritten, and nothing was "
            f"written; name a folder that does not exist, as in `millstream init {_unused()}`"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        what = f"{str(error.filename)!r}: {error.strerror}"
        raise ConfigError(
            f"cannot write the project: {what}; name a folder that you may write to, as in `millstream init {_unused()}`"
        ) from error
    if as_json:
        print_json({"folder": str(folder), "files": list(FILES)})
        return
    for name in FILES:
        print_line(f"{folder / name}")
    print_message("next, in two terminals (README.md has the rest):")
    change = "" if folder == _HERE else f"cd {shlex.quote(str(folder))} && "
    print_message(f"  {change}millstream dev")
    print_message(f"  {change}millstream worker app.py:app")


def _unused() -> str:
    """A name of no file that exists."""
    return next(name for name in chain(["shop"], (f"shop-{n}" for n in count(2))) if not Path(name).exists())
