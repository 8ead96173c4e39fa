"""`millstream demo`: processes a year of real flights on Spark and verifies each one."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from millstream.cli.terminal import print_json
from millstream.demo.report import print_report
from millstream.demo.show import DemoSettings, run_demo


def demo(
    flights: Annotated[
        int | None, typer.Option(help="Number of flights; default: all 336,776.", show_default=False)
    ] = None,
    kill: Annotated[
        bool, typer.Option("--kill", help="Kill a Python worker, and later the driver, with SIGKILL during the run.")
    ] = False,
    url: Annotated[str | None, typer.Option(help="Use this Redis; default: start one.", show_default=False)] = None,
    data_dir: Annotated[Path, typer.Option(help="Folder for what the demo writes; emptied at the start.")] = Path(
        ".millstream/demo"
    ),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the data in Redis, and its folder, at the end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout at the end; all else goes to stderr.")
    ] = False,
) -> None:
    """Process the flights of 2013 from New York in a pipeline on Spark, and verify the result of each."""
    console = Console(stderr=as_json)
    settings = DemoSettings(flights=flights, kill=kill, url=url, data_dir=data_dir, keep=keep)
    outcome = run_demo(settings, console)
    if as_json:
        print_json(outcome.as_json())
    else:
        print_report(console, outcome)
    if not outcome.audit.ok:
        raise typer.Exit(1)
