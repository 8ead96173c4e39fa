"""`millstream master`: delegates a group's messages to consumers in any language."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millstream.cli.config_file import Config, needs
from millstream.cli.options import DEFAULT_URL, Connections, Json, RequestS, Url
from millstream.cli.terminal import say_json, talk
from millstream.errors import ConfigError
from millstream.model import Retry
from millstream.redis_client.eviction import warn_if_evicting_at

if TYPE_CHECKING:
    from millstream.services.master.scopes import Tokens

_LONGEST_RETRY_MS = 600_000

Stream = Annotated[str, typer.Option("--ticket-stream", envvar="ticket_stream", help="The stream of messages.")]
GroupName = Annotated[
    str, typer.Option("--concurrency-stream-group", envvar="concurrency_stream_group", help="Its consumer group.")
]
Name = Annotated[str, typer.Option("--master", envvar="master", help="This master's name, for people.")]
Key = Annotated[str, typer.Option("--key", help="The field that messages are ordered by.")]
Host = Annotated[
    str, typer.Option("--host", help="Where to listen. It speaks plain HTTP: think before you leave this.")
]
Port = Annotated[int, typer.Option("--port", help="0 finds a free one.", min=0, max=65_535)]
PingS = Annotated[float, typer.Option("--ping-interval-s", help="Seconds between two looks at a consumer.", min=0.1)]
PingFailures = Annotated[int, typer.Option("--ping-failures", help="Failed looks until a consumer is dead.", min=1)]
IdleS = Annotated[
    float, typer.Option("--min-idle-time-s", help="Seconds until a message that somebody took is idle.", min=0.1)
]
LeaseS = Annotated[
    float,
    typer.Option("--lease-s", help="Seconds until when a lease is shown to last, from a master's last look.", min=1),
]
LimitS = Annotated[
    float, typer.Option("--delegation-limit-s", help="Seconds that a consumer may have one message.", min=0.1)
]
MaxTickets = Annotated[int, typer.Option("--max-tickets", help="Messages at once, for who does not say.", min=1)]
Attempts = Annotated[int, typer.Option("--attempts", help="How often a message is tried.", min=1)]
RetryS = Annotated[float, typer.Option("--retry-delay-s", help="Seconds before the second attempt.", min=0)]
Then = Annotated[
    Literal["dead-letter", "park", "block"], typer.Option("--then", help="What becomes of it after the last attempt.")
]
Token = Annotated[
    str, typer.Option("--token", envvar="MILLSTREAM_MASTER_TOKEN", help="A token for everything.", show_default=False)
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", help="Lines with a token and its scopes: register acknowledge read admin."),
]
NoToken = Annotated[bool, typer.Option("--insecure-no-token", help="Do as anybody says who can reach it.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-health", help="Where health URLs may be: HOST, *.DOMAIN, an address or network, with or without :PORT."
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option("--allow-host", help="Without a token: a name that consumers call it by. May be repeated."),
]
MostBody = Annotated[int, typer.Option("--most-body", help="Bytes of a request.", min=1_000)]
MostPage = Annotated[int, typer.Option("--most-page", help="Items of a page.", min=1)]


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
    as_json: Json = False,
    config: Config = None,  # noqa: ARG001 - its callback does the work
) -> None:
    """Delegate a group's messages to consumers in any language, one at a time of each ticket. Any number may run."""
    needs("master", "fastapi", "uvicorn")
    from millstream.services.master.health_url_allowlist import LOOPBACK, AllowList
    from millstream.services.master.server import Serving, run_master
    from millstream.services.master.settings import MasterSettings
    from millstream.services.web.connections import Limits
    from millstream.services.web.origin_check import AllowedHosts

    if not ticket_stream or not concurrency_stream_group:
        raise ConfigError("name the stream and its group: --ticket-stream and --concurrency-stream-group")
    settings = MasterSettings(
        ticket_stream=ticket_stream, group=concurrency_stream_group, master=master, key=key, max_tickets=max_tickets,
        ping_ms=round(ping_interval_s * 1000), ping_failures=ping_failures, min_idle_ms=round(min_idle_time_s * 1000),
        lease_ms=round(lease_s * 1000), delegation_ms=round(delegation_limit_s * 1000),
        retry=Retry(attempts=attempts, delay_ms=retry_delay_s * 1000, max_delay_ms=_LONGEST_RETRY_MS, then=then),
    )  # fmt: skip
    tokens = _tokens(token, token_file, insecure=insecure_no_token)
    serving = Serving(
        url=url, tokens=tokens, host=host, port=port, allowed=AllowList(allow_health or LOOPBACK), most_page=most_page,
        names=None if tokens else AllowedHosts(host, allow_host or ()),
        limits=Limits(connections=connections, request_s=request_s, body_bytes=most_body),
    )  # fmt: skip
    warn_if_evicting_at(url)

    def ready(where: str) -> None:
        if as_json:
            say_json({"event": "started", "master": master, "url": where}, flush=True)
        else:
            talk(f"master {master} listens on {where}; Ctrl-C stops")

    run_master(settings, serving, on_ready=ready)


def _tokens(token: str, path: Path | None, *, insecure: bool) -> "Tokens":
    from millstream.services.master.scopes import Tokens

    tokens = Tokens()
    if token:
        tokens.add(token)
    if path is not None:
        tokens.read(path)
    if not tokens and not insecure:
        raise ConfigError(
            "give --token or --token-file: without, anybody could end your messages (--insecure-no-token)"
        )
    return tokens
