"""`millstream serve`: streams for browsers and other clients."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from millstream.cli.config_file import Config, needs
from millstream.cli.options import DEFAULT_URL, Connections, Json, RequestS, Url
from millstream.cli.terminal import say_json, talk
from millstream.errors import ConfigError

Host = Annotated[
    str, typer.Option("--host", help="Where to listen. It speaks plain HTTP: think before you leave this.")
]
Port = Annotated[int, typer.Option("--port", help="0 finds a free one.", min=0, max=65_535)]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="Lines with a token and the streams it is for, like orders:*.")
]
NoToken = Annotated[bool, typer.Option("--insecure-no-token", help="Show all to anybody who can reach it.")]
TicketS = Annotated[
    float, typer.Option("--ticket-s", help="Seconds in which connections can begin with a ticket.", min=1)
]
Origins = Annotated[
    list[str] | None,
    typer.Option("--allow-origin", help="Whose pages may use it, as https://example.org; * for any. May be repeated."),
]
Page = Annotated[
    Path | None,
    typer.Option("--page", help="A folder of pages to serve too.", exists=True, file_okay=False, dir_okay=True),
]
WhenFull = Annotated[
    Literal["wait", "disconnect", "drop-oldest"],
    typer.Option("--when-full", help="A client too slow for its buffer falls behind, has to come back, or loses some."),
]
Buffer = Annotated[
    int, typer.Option("--buffer", help="Messages that wait for a client at most, of each stream.", min=1)
]
BufferBytes = Annotated[
    int, typer.Option("--buffer-bytes", help="Bytes of them at most; one message may be larger.", min=1)
]
BudgetBytes = Annotated[
    int, typer.Option("--budget-bytes", help="Bytes that wait for all clients together, at most.", min=1)
]
StallS = Annotated[
    float, typer.Option("--stall-s", help="Seconds until a client that takes nothing is cut off.", min=0.1)
]
HeartbeatS = Annotated[float, typer.Option("--heartbeat-s", help="Seconds of silence until a heartbeat.", min=0.1)]
PerToken = Annotated[
    int | None,
    typer.Option("--per-token", help="Connections with one token at most; by default all.", min=1, show_default=False),
]
StopS = Annotated[float, typer.Option("--stop-s", help="Seconds that a stop may take.", min=0.1)]
HealthPort = Annotated[
    int | None,
    typer.Option("--health-port", help="Serve /healthz, /readyz and /metrics on 127.0.0.1 here.", min=0, max=65_535),
]


def serve(
    url: Url = DEFAULT_URL,
    host: Host = "127.0.0.1",
    port: Port = 8_000,
    token_file: TokenFile = None,
    insecure_no_token: NoToken = False,
    ticket_s: TicketS = 60.0,
    allow_origin: Origins = None,
    page: Page = None,
    when_full: WhenFull = "wait",
    buffer: Buffer = 1_000,
    buffer_bytes: BufferBytes = 1_048_576,
    budget_bytes: BudgetBytes = 268_435_456,
    stall_s: StallS = 20.0,
    heartbeat_s: HeartbeatS = 15.0,
    connections: Connections = 10_000,
    per_token: PerToken = None,
    request_s: RequestS = 10.0,
    stop_s: StopS = 5.0,
    health_port: HealthPort = None,
    as_json: Json = False,
    config: Config = None,  # noqa: ARG001 - its callback does the work
) -> None:
    """Let browsers and others follow streams live: GET /streams/NAME for server-sent events, /ws/NAME for a WebSocket."""
    needs("serve", "starlette", "uvicorn", "websockets")
    from millstream.services.gateway.auth import Authorizer, new_stream_tokens
    from millstream.services.gateway.connection import FlowControl
    from millstream.services.gateway.connections import ConnectionLimits
    from millstream.services.gateway.server import GatewayOptions, run_gateway
    from millstream.services.web.origin_check import LOOPBACK

    tokens = new_stream_tokens()
    if token_file is not None:
        tokens.read(token_file)
    if not tokens and not insecure_no_token and (token_file is not None or host not in LOOPBACK):
        raise ConfigError("give --token-file: without, anybody could read all streams (--insecure-no-token)")
    serving = GatewayOptions(
        url=url, authorizer=Authorizer(tokens, ticket_s=ticket_s), token_file=token_file, host=host, port=port, origins=allow_origin or (), pages=page,
        host_names=None if tokens or insecure_no_token else LOOPBACK, health_port=health_port, request_s=request_s, stop_s=stop_s,
        flow=FlowControl(
            heartbeat_s=heartbeat_s, stall_s=stall_s, buffer=buffer, buffer_bytes=buffer_bytes, budget_bytes=budget_bytes,
            when_full=when_full,
        ),
        limits=ConnectionLimits(connections=connections, per_token=per_token or connections),
    )  # fmt: skip

    def ready(where: str) -> None:
        if as_json:
            say_json({"event": "started", "url": where}, flush=True)
        else:
            talk(f"streams are served on {where}; Ctrl-C stops")

    run_gateway(serving, on_ready=ready)
    if as_json:
        say_json({"event": "stopped"}, flush=True)
