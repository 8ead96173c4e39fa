"""`millstream console`: serves the operators' console."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.admin.time_inputs import Duration
from millstream.cli.config_file import require_modules
from millstream.cli.metrics_option import print_started
from millstream.cli.options import Connections, Json, RequestTimeout, Url
from millstream.cli.terminal import print_json
from millstream.errors import ConfigError
from millstream.redis_client import DEFAULT_URL

if TYPE_CHECKING:
    from millstream.services.console.rights import ConsoleTokens

Host = Annotated[
    str, typer.Option("--host", help="Address to listen on. It is plain HTTP: be careful with other addresses.")
]
Port = Annotated[int, typer.Option("--port", help="Port to listen on; 0 finds a free one.", min=0, max=65_535)]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", help="Lines with a token, its level (figures, payloads, operate, admin) and name=NAME."
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option("--allow-host", help="Without a token: an accepted host name of requests. Repeatable."),
]
RedactFields = Annotated[
    list[str] | None,
    typer.Option(
        "--redact", help="Hide the values of fields, and in states, with this name. Repeatable.", metavar="NAME"
    ),
]


def console(
    url: Url = DEFAULT_URL,
    host: Host = "127.0.0.1",
    port: Port = 8_080,
    token_file: TokenFile = None,
    allow_host: AllowHost = None,
    redact: RedactFields = None,
    connections: Connections = 100,
    request_timeout: RequestTimeout = Duration("10s"),
    as_json: Json = False,
) -> None:
    """Serve web pages that show what needs attention and act on it. Without a token they only show."""
    require_modules("console", "starlette", "uvicorn", "jinja2")
    from millstream.admin.value_redaction import hide_fields
    from millstream.services.console.console_process import ConsoleOptions, run_console
    from millstream.services.web.connections import Limits
    from millstream.services.web.origin_check import AllowedHosts

    tokens = _tokens(token_file, host)
    serving = ConsoleOptions(
        url=url,
        tokens=tokens,
        token_file=token_file,
        host=host,
        port=port,
        host_names=None if tokens else AllowedHosts(host, allow_host or ()),
        redact=hide_fields(redact or ()),
        limits=Limits(connections=connections, request_s=request_timeout),
    )
    level = "with a token" if tokens else "read-only, without a token"

    def ready(where: str) -> None:
        print_started(f"the console is on {where} ({level}); Ctrl-C stops", None, as_json=as_json, url=where)

    run_console(serving, on_ready=ready)
    if as_json:
        print_json({"event": "stopped"}, flush=True)


def _tokens(path: Path | None, host: str) -> "ConsoleTokens":
    from millstream.services.console.rights import ConsoleTokens
    from millstream.services.web.origin_check import LOOPBACK

    tokens = ConsoleTokens()
    if path is not None:
        tokens.read(path)
    if not tokens and (path is not None or host not in LOOPBACK):
        raise ConfigError(
            "give --token-file with a token: without one the console serves this machine only (--host 127.0.0.1)"
        )
    return tokens
