"""`millstream doctor`: checks Redis, this machine and the data, and says how to mend what it finds."""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import typer
from msgspec.structs import asdict

from millstream.admin.doctor import Diagnosis, diagnose
from millstream.admin.findings import Finding, merge_unchecked
from millstream.admin.time_inputs import Duration
from millstream.app import load_app
from millstream.cli.options import Json, Url, duration
from millstream.cli.terminal import print_json, print_line, print_message
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.formats import pluralize

AppOption = Annotated[
    str | None,
    typer.Option(
        "--app",
        help="Only this app's handlers: its name, or its file (path.py or module:app), which shows leftovers too.",
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, help="Most streams to look at; of more, a sample.")]
OlderThan = Annotated[Duration, duration("--older-than", "Age from which pending entries and silent consumers count.")]

_TIMEOUT_MS = 10_000
_WIDTH = 8


def doctor(
    app: AppOption = None,
    limit: Limit = 1_000,
    older_than: OlderThan = Duration("10m"),
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Check Redis, this machine and the data. Changes nothing; exit code 1 if there is a problem."""
    loaded = load_app(app) if app and (":" in app or app.endswith(".py")) else None
    known = {loaded.name: set(loaded.handlers)} if loaded else {}
    with Client(url, timeout_ms=_TIMEOUT_MS) as client:
        only = loaded.name if loaded else app
        found = diagnose(client, app=only, known=known, max_streams=limit, old_ms=older_than.ms)
    if as_json:
        print_json(
            {
                "ok": not found.count("problem"),
                "streams": found.streams,
                "is_sample": found.is_sample,
                "findings": [asdict(one) for one in found.findings],
            }
        )
    else:
        _print(found)
    if found.count("problem"):
        raise typer.Exit(1)


def _print(found: Diagnosis) -> None:
    findings = merge_unchecked(found.findings)
    for severity in ("problem", "warning", "ok"):
        _print_findings(one for one in findings if one.severity == severity)
    if found.is_sample:
        print_message(f"looked at a sample of {pluralize(found.streams, 'stream')}; --limit N looks at more")
    counts = Counter(one.severity for one in findings)
    print_message(
        f"{pluralize(counts['problem'], 'problem')}, {pluralize(counts['warning'], 'warning')}, {counts['ok']} ok"
    )
    if any(" CONFIG SET " in command for one in found.findings for command in one.mend):
        print_message("CONFIG SET lasts until Redis restarts: put the settings into redis.conf, or run CONFIG REWRITE")


def _print_findings(findings: Iterable[Finding]) -> None:
    for one in findings:
        print_line(f"{one.severity:{_WIDTH}} {one.check}: {one.what}")
        if one.why:
            print_line(f"{'':{_WIDTH}} why: {one.why}")
        for command in one.mend:
            print_line(f"{'':{_WIDTH}} mend: {command}")
