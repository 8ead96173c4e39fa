"""RunningCode: the code and the settings with which a handler runs, reported by those that run it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from millstream.delivery.expiring_members import hold_members, read_members
from millstream.handlers.code_settings import settings_of, source_of
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import running_code_key
from millstream.redis_client.pipelining import server_time_ms

HELD_MS = 30_000
"""How long a report is kept, unless it is repeated."""


class RunningCode(msgspec.Struct, frozen=True, kw_only=True):
    """Reports of workers with the same code and settings are one.

    * `version`: of millstream, "" if unknown; `source`: the file of the handler and a digest of it, "" if unknown
    * `settings`: as text, by the names of `App.handler`, escaped
    * `key_field`: the field that it is keyed by, escaped; "" without a key, and for a key function; None if it is not
      reported, by an earlier version of millstream
    """

    engine: Literal["workers", "spark"]
    version: str
    source: str
    settings: Mapping[str, str]
    key_field: str | None = None


class WorkersCode(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one supervisor, and the code with which they run a handler: as in RunningCode."""

    workers: tuple[str, ...]
    version: str
    source: str


def code_of(
    handlers: Iterable[Handler], *, engine: Literal["workers", "spark"], version: str
) -> dict[str, RunningCode]:
    """Return the code and settings of handlers, by their names. `version`: of millstream."""
    return {
        one.name: RunningCode(
            engine=engine,
            version=version,
            source=source_of(one.function),
            settings=settings_of(one),
            key_field=escape(one.key_field or ""),
        )
        for one in handlers
    }


def report_code(
    client: Client,
    app: str,
    running: Mapping[str, RunningCode],
    *,
    workers: Sequence[str] = (),
    held_ms: int = HELD_MS,
) -> None:
    """Report the code of handlers, by their names, in one round trip; repeat it before `held_ms`; 0 removes the reports.

    `workers`: those that run it. Others that run the same code report it again within seconds. Raises RedisError.
    """
    hold_members(
        client,
        held_ms,
        {running_code_key(app, handler): (code, *_of_workers(code, workers)) for handler, code in running.items()},
    )


def read_code(client: Client, handlers: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Sequence[RunningCode]]:
    """The code that runs of each handler, by app and name: several while a deploy goes on. Raises RedisError.

    () for one that does not run, or whose reports this user may not read.
    """
    asked = list(handlers)
    found = read_members(client, [running_code_key(*one) for one in asked], RunningCode, server_time_ms(client))
    return {one: [code for code, _ in some] for one, some in zip(asked, found, strict=True)}


def read_worker_code(client: Client, handlers: Iterable[tuple[str, str]]) -> dict[tuple[str, str], set[WorkersCode]]:
    """The code that each live worker runs, by app and name, one for each of these handlers. Raises RedisError.

    Workers whose reports this user may not read, and those of earlier versions of millstream, are left out.
    """
    asked = list(handlers)
    found = read_members(client, [running_code_key(*one) for one in asked], WorkersCode, server_time_ms(client))
    codes: dict[tuple[str, str], set[WorkersCode]] = {}
    for (app, _), reports in zip(asked, found, strict=True):
        # A name that another supervisor holds now is in two reports: the one that is kept longer is the later one.
        latest = {worker: code for code, _ in reports for worker in code.workers}
        for worker, code in latest.items():
            codes.setdefault((app, worker), set()).add(code)
    return codes


def _of_workers(code: RunningCode, workers: Sequence[str]) -> Sequence[WorkersCode]:
    return [WorkersCode(workers=tuple(workers), version=code.version, source=code.source)] if workers else ()
