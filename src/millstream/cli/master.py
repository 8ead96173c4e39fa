"""`millstream master`: delegates a group's messages to consumers in any language."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millstream.admin.server_checks import warn_of_data_loss_at
from millstream.admin.time_inputs import Duration
from millstream.cli.config_file import require_modules
from millstream.cli.metrics_option import new_recorder, print_started
from millstream.cli.options import Connections, Json, MetricsAddress, RequestTimeout, Url, duration, parse_address
from millstream.errors import ConfigError
from millstream.model import Retry
from millstream.redis_client import DEFAULT_URL

if TYPE_CHECKING:
    from millstream.services.master.health_url_allowlist import AllowList
    from millstream.services.master.master_process import MasterServerOptions
    from millstream.services.master.scopes import Tokens
    from millstream.services.master.settings import MasterSettings
    from millstream.services.web.connections import Limits
    from millstream.services.web.origin_check import AllowedHosts

_MAX_RETRY_DELAY_MS = 600_000

Stream = Annotated[str, typer.Option("--ticket-stream", help="The stream of messages.")]
GroupName = Annotated[str, typer.Option("--concurrency-stream-group", help="Its consumer group.")]
Name = Annotated[str, typer.Option("--name", help="This master's name, shown to operators.")]
Key = Annotated[str, typer.Option("--key", help="The field that messages are ordered by.")]
Host = Annotated[
    str, typer.Option("--host", help="Address to listen on. It is plain HTTP: be careful with other addresses.")
]
Port = Annotated[int, typer.Option("--port", help="Port to listen on; 0 finds a free one.", min=0, max=65_535)]
PingInterval = Annotated[
    Duration, duration("--ping-interval", "Time between two health checks of a consumer.", least="100ms")
]
PingFailures = Annotated[
    int, typer.Option("--ping-failures", help="Failed health checks until a consumer is dead.", min=1)
]
MinIdle = Annotated[
    Duration, duration("--min-idle", "Time until a message read without a master is claimed.", least="100ms")
]
LeaseTime = Annotated[
    Duration, duration("--lease", "Time of a lease as shown in Redis, from its last renewal.", least="1s")
]
DelegationLimit = Annotated[
    Duration, duration("--delegation-limit", "Time that a consumer may hold one message.", least="100ms")
]
MaxTickets = Annotated[
    int, typer.Option("--max-tickets", help="Messages per consumer at once, unless it gives a number.", min=1)
]
Attempts = Annotated[int, typer.Option("--attempts", help="Maximum number of attempts per message.", min=1)]
RetryDelay = Annotated[Duration, duration("--retry-delay", "Time before the second attempt.")]
Then = Annotated[
    Literal["dead-letter", "park", "block"], typer.Option("--then", help="What to do after the last attempt.")
]
Token = Annotated[str, typer.Option("--token", help="A token with all scopes.", show_default=False)]
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
MaxBody = Annotated[int, typer.Option("--max-body", help="Maximum bytes of a request.", min=1_000)]
MaxPageSize = Annotated[int, typer.Option("--max-page-size", help="Maximum number of items of a page.", min=1)]


def master(
    url: Url = DEFAULT_URL,
    ticket_stream: Stream = "",
    concurrency_stream_group: GroupName = "",
    name: Name = "master",
    key: Key = "ticket_id",
    host: Host = "127.0.0.1",
    port: Port = 8_000,
    ping_interval: PingInterval = Duration("5s"),
    ping_failures: PingFailures = 3,
    min_idle: MinIdle = Duration("1m"),
    lease: LeaseTime = Duration("30s"),
    delegation_limit: DelegationLimit = Duration("5m"),
    max_tickets: MaxTickets = 1,
    attempts: Attempts = 4,
    retry_delay: RetryDelay = Duration("1s"),
    then: Then = "dead-letter",
    token: Token = "",
    token_file: TokenFile = None,
    insecure_no_token: NoToken = False,
    allow_host: AllowHost = None,
    allow_health: Allow = None,
    connections: Connections = 2_000,
    request_timeout: RequestTimeout = Duration("10s"),
    max_body: MaxBody = 65_536,
    max_page_size: MaxPageSize = 1_000,
    metrics_address: MetricsAddress = "",
    as_json: Json = False,
) -> None:
    """Delegate a group's messages to consumers in any language, one at a time per ticket. Several masters may run."""
    _require(ticket_stream, concurrency_stream_group)
    from millstream.services.master.master_process import MasterServerOptions
    from millstream.services.master.settings import MasterSettings

    settings = MasterSettings(
        ticket_stream=ticket_stream,
        group=concurrency_stream_group,
        master=name,
        key=key,
        max_tickets=max_tickets,
        ping_ms=ping_interval.ms,
        ping_failures=ping_failures,
        claim_idle_ms=min_idle.ms,
        lease_ms=lease.ms,
        delegation_ms=delegation_limit.ms,
        retry=_retry(attempts, retry_delay, then),
    )
    tokens = _tokens(token, token_file, insecure=insecure_no_token)
    serving = MasterServerOptions(
        url=url,
        tokens=tokens,
        host=host,
        port=port,
        allow_list=_allow_list(allow_health),
        max_page=max_page_size,
        host_names=None if tokens else _allowed_hosts(host, allow_host),
        limits=_limits(connections, request_timeout, max_body),
        metrics_address=parse_address(metrics_address),
    )
    _run(settings, serving, as_json=as_json)


def _require(stream: str, group: str) -> None:
    """Raise ConfigError if a module is not installed, or the stream or its group was not given."""
    require_modules("master", "fastapi", "uvicorn")
    if not stream or not group:
        raise ConfigError("give the stream and its group: --ticket-stream and --concurrency-stream-group")


def _allow_list(patterns: list[str] | None) -> "AllowList":
    from millstream.services.master.health_url_allowlist import LOOPBACK, AllowList

    return AllowList(patterns or LOOPBACK)


def _allowed_hosts(host: str, others: list[str] | None) -> "AllowedHosts":
    from millstream.services.web.origin_check import AllowedHosts

    return AllowedHosts(host, others or ())


def _limits(connections: int, request_s: float, body_bytes: int) -> "Limits":
    from millstream.services.web.connections import Limits

    return Limits(connections=connections, request_s=request_s, body_bytes=body_bytes)


def _retry(attempts: int, delay: Duration, then: Then) -> Retry:
    return Retry(attempts=attempts, delay_ms=delay.ms, max_delay_ms=max(_MAX_RETRY_DELAY_MS, delay.ms), then=then)


def _run(settings: "MasterSettings", serving: "MasterServerOptions", *, as_json: bool) -> None:
    from millstream.services.master.master_process import run_master

    def ready(where: str, metrics_url: str | None) -> None:
        text = f"master {settings.master} listens on {where}; Ctrl-C stops"
        print_started(text, metrics_url, as_json=as_json, master=settings.master, url=where)

    warn_of_data_loss_at(serving.url)
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
