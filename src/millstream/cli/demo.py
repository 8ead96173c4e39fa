"""`millstream demo`: a year of real flights, processed on Spark and checked one by one."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from millstream.cli.terminal import say_json
from millstream.demo.report import print_report
from millstream.demo.show import DemoSettings, run_demo


def demo(
    flights: Annotated[
        int | None, typer.Option(help="How many flights; default: all 336,776.", show_default=False)
    ] = None,
    kill: Annotated[
        bool, typer.Option("--kill", help="Kill Python workers and the driver with SIGKILL in mid-run.")
    ] = False,
    url: Annotated[str | None, typer.Option(help="Use this Redis; default: start one.", show_default=False)] = None,
    data_dir: Annotated[Path, typer.Option(help="Folder for what the demo writes; emptied at the start.")] = Path(
        ".millstream/demo"
    ),
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the data in Redis, and its folder, when it is over.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout at the end; all else goes to stderr.")
    ] = False,
) -> None:
    """Run the flights of 2013 from New York through a pipeline on Spark, and check what became of each."""
    console = Console(stderr=as_json)
    settings = DemoSettings(flights=flights, kill=kill, url=url, data_dir=data_dir, keep=keep)
    outcome = run_demo(settings, console)
    if as_json:
        say_json(outcome.as_json())
    else:
        print_report(console, outcome)
    if not outcome.audit.ok:
        raise typer.Exit(1)
