"""`millstream master`: delegates a group's messages to consumers in any language."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millstream.cli.config_file import Config, require_modules
from millstream.cli.metrics_server import new_recorder, print_started
from millstream.cli.options import DEFAULT_URL, Connections, Json, MetricsAddress, RequestS, Url, parse_address
from millstream.errors import ConfigError
from millstream.model import Retry
from millstream.redis_client.eviction import warn_if_url_evicting

if TYPE_CHECKING:
    from millstream.services.master.scopes import Tokens

_MAX_RETRY_DELAY_MS = 600_000

Stream = Annotated[str, typer.Option("--ticket-stream", envvar="ticket_stream", help="The stream of messages.")]
GroupName = Annotated[
    str, typer.Option("--concurrency-stream-group", envvar="concurrency_stream_group", help="Its consumer group.")
]
Name = Annotated[str, typer.Option("--master", envvar="master", help="This master's name, shown to operators.")]
Key = Annotated[str, typer.Option("--key", help="The field that messages are ordered by.")]
Host = Annotated[
    str, typer.Option("--host", help="Address to listen on. It is plain HTTP: be careful with other addresses.")
]
Port = Annotated[int, typer.Option("--port", help="Port to listen on; 0 finds a free one.", min=0, max=65_535)]
PingS = Annotated[
    float, typer.Option("--ping-interval-s", help="Seconds between two health checks of a consumer.", min=0.1)
]
PingFailures = Annotated[
    int, typer.Option("--ping-failures", help="Failed health checks until a consumer is dead.", min=1)
]
IdleS = Annotated[
    float,
    typer.Option("--min-idle-time-s", help="Seconds until a message read without a master is claimed.", min=0.1),
]
LeaseS = Annotated[
    float, typer.Option("--lease-s", help="Seconds of a lease as shown in Redis, from its last renewal.", min=1)
]
LimitS = Annotated[
    float, typer.Option("--delegation-limit-s", help="Seconds that a consumer may hold one message.", min=0.1)
]
MaxTickets = Annotated[
    int, typer.Option("--max-tickets", help="Messages per consumer at once, unless it gives a number.", min=1)
]
Attempts = Annotated[int, typer.Option("--attempts", help="Maximum number of attempts per message.", min=1)]
RetryS = Annotated[float, typer.Option("--retry-delay-s", help="Seconds before the second attempt.", min=0)]
Then = Annotated[
    Literal["dead-letter", "park", "block"], typer.Option("--then", help="What to do after the last attempt.")
]
Token = Annotated[
    str, typer.Option("--token", envvar="MILLSTREAM_MASTER_TOKEN", help="A token with all scopes.", show_default=False)
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", help="Lines with a token and its scopes: register acknowledge read admin."),
]
NoToken = Annotated[bool, typer.Option("--insecure-no-token", help="Accept all requests without a token.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-health", help="Allowed health URLs: HOST, *.DOMAIN, an address or network, with or without :PORT."
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option("--allow-host", help="Without a token: an accepted host name of requests. Repeatable."),
]
MostBody = Annotated[int, typer.Option("--most-body", help="Maximum bytes of a request.", min=1_000)]
MostPage = Annotated[int, typer.Option("--most-page", help="Maximum number of items of a page.", min=1)]


def master(
    url: Url = DEFAULT_URL,
    ticket_stream: Stream = "",
    concurrency_stream_group: GroupName = "",
    master: Name = "master",
    key: Key = "ticket_id",
    host: Host = "127.0.0.1",
    port: Port = 8_000,
    ping_interval_s: PingS = 5.0,
    ping_failures: PingFailures = 3,
    min_idle_time_s: IdleS = 60.0,
    lease_s: LeaseS = 30.0,
    delegation_limit_s: LimitS = 300.0,
    max_tickets: MaxTickets = 1,
    attempts: Attempts = 4,
    retry_delay_s: RetryS = 1.0,
    then: Then = "dead-letter",
    token: Token = "",
    token_file: TokenFile = None,
    insecure_no_token: NoToken = False,
    allow_host: AllowHost = None,
    allow_health: Allow = None,
    connections: Connections = 2_000,
    request_s: RequestS = 10.0,
    most_body: MostBody = 65_536,
    most_page: MostPage = 1_000,
    metrics_address: MetricsAddress = "",
    as_json: Json = False,
    config: Config = None,  # noqa: ARG001 - handled by its callback
) -> None:
    """Delegate a group's messages to consumers in any language, one at a time per ticket. Several masters may run."""
    require_modules("master", "fastapi", "uvicorn")
    from millstream.services.master.health_url_allowlist import LOOPBACK, AllowList
    from millstream.services.master.server import MasterServerOptions, run_master
    from millstream.services.master.settings import MasterSettings
    from millstream.services.web.connections import Limits
    from millstream.services.web.origin_check import AllowedHosts

    if not ticket_stream or not concurrency_stream_group:
        raise ConfigError("give the stream and its group: --ticket-stream and --concurrency-stream-group")
    settings = MasterSettings(
        ticket_stream=ticket_stream, group=concurrency_stream_group, master=master, key=key, max_tickets=max_tickets,
        ping_ms=round(ping_interval_s * 1000), ping_failures=ping_failures, claim_idle_ms=round(min_idle_time_s * 1000),
        lease_ms=round(lease_s * 1000), delegation_ms=round(delegation_limit_s * 1000),
        retry=Retry(attempts=attempts, delay_ms=retry_delay_s * 1000, max_delay_ms=_MAX_RETRY_DELAY_MS, then=then),
    )  # fmt: skip
    tokens = _tokens(token, token_file, insecure=insecure_no_token)
    serving = MasterServerOptions(
        url=url, tokens=tokens, host=host, port=port, allow_list=AllowList(allow_health or LOOPBACK), max_page=most_page,
        host_names=None if tokens else AllowedHosts(host, allow_host or ()),
        limits=Limits(connections=connections, request_s=request_s, body_bytes=most_body),
        metrics_address=parse_address(metrics_address),
    )  # fmt: skip
    warn_if_url_evicting(url)

    def ready(where: str, metrics_url: str | None) -> None:
        text = f"master {master} listens on {where}; Ctrl-C stops"
        print_started(text, metrics_url, as_json=as_json, master=master, url=where)

    run_master(settings, serving, recorder=new_recorder("master"), on_ready=ready)


def _tokens(token: str, path: Path | None, *, insecure: bool) -> "Tokens":
    from millstream.services.master.scopes import Tokens

    tokens = Tokens()
    if token:
        tokens.add(token)
    if path is not None:
        tokens.read(path)
    if not tokens and not insecure:
        raise ConfigError(
            "give --token or --token-file: without one every client may end your messages (--insecure-no-token)"
        )
    return tokens
