"""`millstream serve`: serves streams to browsers and other clients."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millstream.admin.time_inputs import Duration
from millstream.cli.config_file import require_modules
from millstream.cli.metrics_option import new_recorder, print_started
from millstream.cli.options import Connections, Json, MetricsAddress, RequestTimeout, Url, duration, parse_address
from millstream.cli.terminal import print_json
from millstream.errors import ConfigError
from millstream.redis_client import DEFAULT_URL

if TYPE_CHECKING:
    from millstream.services.web.bearer_tokens import TokenStore

Host = Annotated[
    str, typer.Option("--host", help="Address to listen on. It is plain HTTP: be careful with other addresses.")
]
Port = Annotated[int, typer.Option("--port", help="Port to listen on; 0 finds a free one.", min=0, max=65_535)]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="Lines with a token and its streams, like orders:*.")
]
NoToken = Annotated[bool, typer.Option("--insecure-no-token", help="Serve all streams without a token.")]
TicketTime = Annotated[Duration, duration("--ticket", "Time within which a ticket can open connections.", least="1s")]
Origins = Annotated[
    list[str] | None,
    typer.Option("--allow-origin", help="Allowed origin of web pages, as https://example.org; * for any. Repeatable."),
]
Page = Annotated[
    Path | None,
    typer.Option("--page", help="A folder of pages to serve too.", exists=True, file_okay=False, dir_okay=True),
]
WhenFull = Annotated[
    Literal["wait", "disconnect", "drop-oldest"],
    typer.Option("--when-full", help="If a client's buffer is full: let it lag, disconnect it, or drop messages."),
]
Buffer = Annotated[
    int, typer.Option("--buffer", help="Maximum number of messages buffered per client and stream.", min=1)
]
BufferBytes = Annotated[
    int, typer.Option("--buffer-bytes", help="Maximum bytes of that buffer; one message may be larger.", min=1)
]
BudgetBytes = Annotated[
    int, typer.Option("--budget-bytes", help="Maximum bytes buffered for all clients together.", min=1)
]
Stall = Annotated[
    Duration, duration("--stall", "Time until a client that reads nothing is disconnected.", least="100ms")
]
Heartbeat = Annotated[Duration, duration("--heartbeat", "Time of silence until a heartbeat.", least="100ms")]
PerToken = Annotated[
    int | None,
    typer.Option(
        "--per-token", help="Maximum number of connections per token; default: no limit.", min=1, show_default=False
    ),
]
StopTimeout = Annotated[Duration, duration("--stop-timeout", "Maximum time of a stop.", least="100ms")]


def serve(
    url: Url = DEFAULT_URL,
    host: Host = "127.0.0.1",
    port: Port = 8_000,
    token_file: TokenFile = None,
    insecure_no_token: NoToken = False,
    ticket: TicketTime = Duration("1m"),
    allow_origin: Origins = None,
    page: Page = None,
    when_full: WhenFull = "wait",
    buffer: Buffer = 1_000,
    buffer_bytes: BufferBytes = 1_048_576,
    budget_bytes: BudgetBytes = 268_435_456,
    stall: Stall = Duration("20s"),
    heartbeat: Heartbeat = Duration("15s"),
    connections: Connections = 10_000,
    per_token: PerToken = None,
    request_timeout: RequestTimeout = Duration("10s"),
    stop_timeout: StopTimeout = Duration("5s"),
    metrics_address: MetricsAddress = "",
    as_json: Json = False,
) -> None:
    """Serve streams live to browsers: GET /streams/NAME for server-sent events, /ws/NAME for a WebSocket."""
    require_modules("serve", "starlette", "uvicorn", "websockets")
    from millstream.services.gateway.auth import Authorizer
    from millstream.services.gateway.client_connection import FlowControl
    from millstream.services.gateway.connection_manager import ConnectionLimits
    from millstream.services.gateway.gateway_process import GatewayOptions, run_gateway
    from millstream.services.web.origin_check import LOOPBACK

    tokens = _tokens(token_file, host, insecure=insecure_no_token)
    serving = GatewayOptions(
        url=url,
        authorizer=Authorizer(tokens, ticket_s=ticket),
        token_file=token_file,
        host=host,
        port=port,
        origins=allow_origin or (),
        pages=page,
        host_names=None if tokens or insecure_no_token else LOOPBACK,
        metrics_address=parse_address(metrics_address),
        request_s=request_timeout,
        stop_s=stop_timeout,
        flow=FlowControl(
            heartbeat_s=heartbeat,
            stall_s=stall,
            buffer=buffer,
            buffer_bytes=buffer_bytes,
            budget_bytes=budget_bytes,
            when_full=when_full,
        ),
        limits=ConnectionLimits(connections=connections, per_token=per_token or connections),
    )

    def ready(where: str, metrics_url: str | None) -> None:
        print_started(f"serving streams on {where}; Ctrl-C stops", metrics_url, as_json=as_json, url=where)

    run_gateway(serving, recorder=new_recorder("gateway"), on_ready=ready)
    if as_json:
        print_json({"event": "stopped"}, flush=True)


def _tokens(path: Path | None, host: str, *, insecure: bool) -> "TokenStore":
    from millstream.services.gateway.auth import new_stream_tokens
    from millstream.services.web.origin_check import LOOPBACK

    tokens = new_stream_tokens()
    if path is not None:
        tokens.read(path)
    if not tokens and not insecure and (path is not None or host not in LOOPBACK):
        raise ConfigError("give --token-file: without a token every client may read all streams (--insecure-no-token)")
    return tokens
