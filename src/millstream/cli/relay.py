"""`millstream relay`: moves rows of another system's table to a stream, each once."""

from functools import partial
from typing import Annotated

import typer

from millstream.admin.time_inputs import Duration
from millstream.cli.config_file import require_modules
from millstream.cli.options import Json, Url, command_group, duration
from millstream.cli.signals import orderly_stop
from millstream.cli.terminal import print_json, print_message
from millstream.errors import Unavailable
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.formats import pluralize
from millstream.redis_client.pipelining import server_time_ms

Stream = Annotated[str, typer.Argument(help="The stream.", metavar="STREAM")]
Database = Annotated[
    str,
    typer.Option(help="Connection string or URL of PostgreSQL; default: the variables PGHOST, PGDATABASE, ..."),
]
Table = Annotated[str, typer.Option(help="The outbox table: NAME or SCHEMA.NAME.")]
Poll = Annotated[Duration, duration("--poll", "Interval at which an empty table is read.", least="10ms")]
Once = Annotated[bool, typer.Option("--once", help="Move the rows that are there, and end.")]
CreateTables = Annotated[bool, typer.Option("--create-tables", help="Create the tables if they do not exist.")]

relay = command_group("Move the rows of an outbox table to a stream.")


@relay.callback()
def of_databases() -> None:
    """Move the rows of an outbox table to a stream, each once."""


@relay.command()
def postgres(
    stream: Stream,
    database: Database = "",
    table: Table = "outbox",
    poll: Poll = Duration("200ms"),
    once: Once = False,
    create_tables: CreateTables = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Move the rows of an outbox table of PostgreSQL to STREAM: each once, in order, as soon as it is committed."""
    require_modules("postgres", "psycopg")
    from millstream.producer.postgres_relay import PostgresRelay

    with orderly_stop() as stopping, Client(url) as client:
        moving = PostgresRelay(client, stream, database=database, table=table)
        try:
            client.retry_while_unavailable(partial(server_time_ms, client), what="the relay", give_up=stopping.is_set)
        except Unavailable:  # it is to stop before Redis has answered
            return
        if as_json:
            print_json({"event": "started", "table": table, "stream": stream}, flush=True)
        else:
            print_message(f"moving the rows of {table} to {stream}; Ctrl-C stops")
        moving.run(stopping, poll_ms=poll.ms, once=once, create_tables=create_tables)
    if as_json:
        print_json({"event": "stopped", "rows": moving.rows}, flush=True)
    else:
        print_message(f"stopped: {pluralize(moving.rows, 'row')} moved")
