"""`millstream consumer`: runs a function as a consumer to which a master delegates messages."""

import os
import sys
from typing import Annotated

import typer

from millstream.admin.time_inputs import Duration
from millstream.app import load_function
from millstream.cli.config_file import require_modules
from millstream.cli.log_output import finish_logging
from millstream.cli.options import Connections, Json, RequestTimeout, Url, duration
from millstream.cli.terminal import print_json, print_message
from millstream.errors import ConfigError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.deployments import parse_route
from millstream.redis_client.formats import join_words

Target = Annotated[str, typer.Argument(help="module:function or path/to/file.py:function", metavar="FUNCTION")]
Stream = Annotated[str, typer.Option("--ticket-stream", help="The stream of messages.")]
GroupName = Annotated[str, typer.Option("--concurrency-stream-group", help="Its consumer group.")]
Name = Annotated[str, typer.Option("--name", help="This consumer's name in the group.")]
Register = Annotated[
    list[str] | None,
    typer.Option(
        "--master-register-api-url",
        help="URL of each master: .../api/consumers/register",
    ),
]
Acknowledge = Annotated[
    list[str] | None,
    typer.Option(
        "--master-acknowledge-api-url",
        help="URL of each master: .../api/messages/acknowledge",
    ),
]
Token = Annotated[
    str,
    typer.Option(
        "--token",
        envvar=["MILLSTREAM_CONSUMER_TOKEN", "MILLSTREAM_MASTER_TOKEN"],
        help="Token for the master.",
        show_default=False,
    ),
]
Host = Annotated[str, typer.Option("--host", help="Address on which /api/health is served.")]
Port = Annotated[int, typer.Option("--port", help="Port to listen on; 0 finds a free one.", min=0, max=65_535)]
HealthUrl = Annotated[
    str, typer.Option("--health-url", help="URL of /api/health as masters reach it, if not the listen address.")
]
Key = Annotated[str, typer.Option("--key", help="The field that messages are ordered by.")]
MaxTickets = Annotated[int, typer.Option("--max-tickets", help="Maximum number of messages at once.", min=1, max=1_000)]
Poll = Annotated[Duration, duration("--poll", "Time between two reads.", least="1ms")]
TimeLimit = Annotated[
    Duration, duration("--time-limit", "Time after which a run makes the consumer unhealthy.", least="100ms")
]
StopTimeout = Annotated[Duration, duration("--stop-timeout", "Time that a stop waits for running messages.")]

_CHECK_TIMEOUT_MS = 1_000
_REQUIRED = (
    "--ticket-stream",
    "--concurrency-stream-group",
    "--name",
    "--master-register-api-url",
    "--master-acknowledge-api-url",
)


def consumer(
    target: Target,
    url: Url = DEFAULT_URL,
    ticket_stream: Stream = "",
    concurrency_stream_group: GroupName = "",
    name: Name = "",
    master_register_api_url: Register = None,
    master_acknowledge_api_url: Acknowledge = None,
    token: Token = "",
    host: Host = "127.0.0.1",
    port: Port = 0,
    health_url: HealthUrl = "",
    key: Key = "ticket_id",
    max_tickets: MaxTickets = 1,
    poll: Poll = Duration("50ms"),
    time_limit: TimeLimit = Duration("5m"),
    connections: Connections = 100,
    request_timeout: RequestTimeout = Duration("10s"),
    stop_timeout: StopTimeout = Duration("25s"),
    as_json: Json = False,
) -> None:
    """Run a function, plain or async, on the messages that a master delegates."""
    require_modules("master", "starlette", "uvicorn")
    from millstream.services.master.consumer_server import run_consumer
    from millstream.services.master.delegated_consumer import ConsumerSettings
    from millstream.services.web.connections import Limits

    _check_required(ticket_stream, concurrency_stream_group, name, master_register_api_url, master_acknowledge_api_url)
    parse_route(url, _CHECK_TIMEOUT_MS)  # reports an invalid URL now: Redis is called only after the registration
    settings = ConsumerSettings(
        url=url,
        ticket_stream=ticket_stream,
        group=concurrency_stream_group,
        consumer=name,
        register_urls=tuple(master_register_api_url or ()),
        acknowledge_urls=tuple(master_acknowledge_api_url or ()),
        health_url=health_url,
        token=token,
        key=key,
        max_tickets=max_tickets,
        poll_ms=poll.ms,
        time_limit_ms=time_limit.ms,
    )
    function = load_function(target)
    finish_logging()

    def ready(where: str) -> None:
        if as_json:
            print_json({"event": "started", "consumer": name, "url": where}, flush=True)
        else:
            print_message(f"consumer {name} listens on {where}; Ctrl-C stops")

    limits = Limits(connections=connections, request_s=request_timeout)
    run_consumer(function, settings, host=host, port=port, limits=limits, stop_s=stop_timeout, on_ready=ready)
    # A function that still runs would keep the process alive; its message is reassigned.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _check_required(*values: object) -> None:
    """Raise ConfigError with all options that are missing; they may come from the environment and from a file, too."""
    if missing := [option for option, value in zip(_REQUIRED, values, strict=True) if not value]:
        raise ConfigError(f"a consumer needs {join_words(missing, 'and')}; see: millstream consumer --help")
