"""All checks of the data in Redis, in the order of their findings.

Findings are summed up by handler: a handler of 100,000 streams has one line for each kind of trouble.
"""

from collections.abc import Callable, Iterable, Mapping

from millstream.admin.backlog_checks import (
    check_dead_consumers,
    check_failed_queries,
    check_idle_entries,
    check_late,
    check_overdue,
    check_stages,
    check_waiting,
)
from millstream.admin.examined_data import Data
from millstream.admin.failure_checks import (
    check_blocked,
    check_dead_letters,
    check_long_runs,
    check_parked,
    check_paused,
    check_restarts,
)
from millstream.admin.findings import Finding
from millstream.admin.stored_data_checks import check_format, check_growth, check_leftovers, check_unreadable

DATA_CHECKS: Mapping[str, Callable[[Data], Iterable[Finding]]] = {
    "unreadable": check_unreadable,
    "format": check_format,
    "dead-consumers": check_dead_consumers,
    "idle-entries": check_idle_entries,
    "waiting": check_waiting,
    "late": check_late,
    "stages": check_stages,
    "failed-queries": check_failed_queries,
    "overdue": check_overdue,
    "restarts": check_restarts,
    "long-runs": check_long_runs,
    "dead-letters": check_dead_letters,
    "parked": check_parked,
    "blocked": check_blocked,
    "paused": check_paused,
    "growth": check_growth,
    "leftovers": check_leftovers,
}
