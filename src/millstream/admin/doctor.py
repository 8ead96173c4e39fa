"""Diagnosis of a deployment: runs every check of Redis, of the machine and of the data, and returns what they found."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from millstream.admin.data_checks import DATA_CHECKS
from millstream.admin.examined_data import Data, largest_mean_entry_bytes, read_data
from millstream.admin.findings import Finding, run_check
from millstream.admin.machine_checks import MACHINE_CHECKS
from millstream.admin.reports import Inspection
from millstream.admin.rights_check import check_rights
from millstream.admin.server_checks import SERVER_CHECKS, Server, check_buffers, check_cluster, read_servers, redis_cli
from millstream.errors import AccessDenied, RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.formats import pluralize
from millstream.redis_client.key_names import stage_of
from millstream.redis_client.replies import fields_of_info

_DEFAULT_OLD_MS = 600_000


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings, those of the data last; `streams`: how many were examined; `is_sample`: there may be more.

    `inspection`: the streams and handlers that were examined; None if they could not be read.
    """

    findings: tuple[Finding, ...]
    streams: int = 0
    is_sample: bool = False
    inspection: Inspection | None = None

    def count(self, severity: str) -> int:
        """How many findings have this severity."""
        return sum(one.severity == severity for one in self.findings)


def diagnose(
    client: Client,
    *,
    app: str | None = None,
    known: Mapping[str, Collection[str]] | None = None,
    max_streams: int = 1_000,
    old_ms: int = _DEFAULT_OLD_MS,
) -> Diagnosis:
    """Run all checks. Changes nothing. A check that Redis refuses is a finding of its own, and the others go on.

    * `app`: examine the handlers of this app only; `known`: by app, the names of the handlers that its file has
    * `max_streams`: of more streams, examine a sample of this size
    * `old_ms`: from which age on pending entries, backlogs and silent consumers are findings, in milliseconds

    Raises ConfigError for an invalid URL.
    """
    findings = [one for name, check in MACHINE_CHECKS.items() for one in run_check(name, check)]
    cli = "redis-cli"
    try:
        cli = redis_cli(client.url, client.execute_on_primaries("PING")[0][0]) + (" -c" if client.is_cluster else "")
    except AccessDenied as error:
        if error.concerns_credentials:  # else the checks below say what the user may not do
            return Diagnosis(findings=(*findings, _unusable("access", error)))
    except RedisError as error:
        return Diagnosis(findings=(*findings, _unusable("reachable", error)))
    data: list[Data] = []

    def read() -> Iterator[Finding]:
        data.append(read_data(client, app=app, known=known or {}, cli=cli, max_streams=max_streams, old_ms=old_ms))
        yield from _hidden(data[0])
        if app is not None and not known:
            yield from _check_name(data[0], app)

    read_findings = [*run_check("data", read)]
    servers = _Servers(client)
    findings += servers.check()
    findings += run_check("rights", partial(check_rights, client))
    findings += read_findings
    if not data and not servers.found:
        what, why = "Redis refuses this user every command of the checks", "it cannot work with streams either"
        findings.append(Finding(check="access", severity="problem", what=what, why=why, mend=("millstream acl",)))
    for name, check in DATA_CHECKS.items() if data else ():
        findings += run_check(name, partial(check, data[0]))
    return Diagnosis(
        findings=tuple(findings),
        streams=sum(len(one.found.streams) for one in data),
        is_sample=any(one.found.is_sample for one in data),
        inspection=data[0].found if data else None,
    )


def _unusable(check: str, error: RedisError) -> Finding:
    return Finding(check=check, severity="problem", what=str(error), why="nothing can be read or written")


class _Servers:
    """The primaries, once they are read, and their checks."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.found: list[Server] = []

    def check(self) -> Iterator[Finding]:
        """The findings on all primaries, and on the cluster."""
        largest = partial(largest_mean_entry_bytes, self._client)
        yield from run_check("settings", self._read)
        for server in self.found:
            for name, check in SERVER_CHECKS.items():
                yield from run_check(name, partial(check, server))
            yield from run_check("buffers", partial(check_buffers, server, largest_mean_entry_bytes=largest))
            yield from run_check("cluster", partial(check_cluster, server, is_cluster=self._client.is_cluster))
        if self._client.is_cluster:
            yield from run_check("cluster", partial(_check_cluster_state, self._client))

    def _read(self) -> Iterable[Finding]:
        self.found = read_servers(self._client)
        return ()


def _check_cluster_state(client: Client) -> Iterator[Finding]:
    for address, reply in client.execute_on_primaries("CLUSTER", "INFO"):
        fields = fields_of_info(reply)
        if fields.get("cluster_state") != "ok":
            yield Finding(
                check="cluster",
                severity="problem",
                what=f"the cluster is not ok, says {address}: {fields.get('cluster_slots_ok', '?')} of 16384 slots are served",
                why="streams in the other slots can be neither read nor written",
                mend=(f"redis-cli --cluster check {address}",),
            )
            return
    yield Finding(check="cluster", severity="ok", what="all slots are served")


def _check_name(data: Data, app: str) -> Iterator[Finding]:
    """Nothing is found of an app: its name may be misspelt."""
    stages = {stage_of(group.name) for stream in data.found.streams for group in stream.groups}
    if (
        not data.found.handlers
        and not data.found.hidden_handlers
        and app not in {one[0] for one in stages if one is not None}
    ):
        yield Finding(
            check="app",
            severity="problem",
            what=f"no handler or stage of an app named {app!r} has run on this Redis",
            why="nothing of it can be checked",
            mend=("millstream info  # the names that there are",),
        )


def _hidden(data: Data) -> Iterator[Finding]:
    streams, handlers = data.found.hidden_streams, data.found.hidden_handlers
    if streams or handlers:
        yield Finding(
            check="data",
            severity="warning",
            what=f"not checked: {pluralize(streams, 'stream')} and {pluralize(handlers, 'handler on a stream', 'handlers on streams')} "
            "that this Redis user may not access",
            mend=("millstream acl operator",),
        )
