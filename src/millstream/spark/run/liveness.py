"""Liveness: a key in Redis for each running query, read by `millstream info`, as workers hold their names.

A run removes its keys when its queries have stopped; those of a run that dies expire. The value of a key is the epoch of
the run. Of two live runs of a stage the older one stops once it sees a greater epoch: handlers and the Redis sink have
fences of their own, a stage that writes elsewhere has none.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Event

from millstream.delivery.query_progress import QueryProgress, report_progress
from millstream.delivery.running_code import RunningCode, report_code
from millstream.errors import AccessDenied, RedisError
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import query_progress_key, run_name, worker_name_key
from millstream.redis_client.pipelining import call_all, server_time_us
from millstream.worker.static_membership import HOLD_NAME

logger = logging.getLogger(__name__)

_TTL_MS, _INTERVAL_S = 30_000, 10.0
_CHECK_S = 1.0
_REPORT_CALLS = 5


def begin_run(client: Client, app: str, names: Sequence[str]) -> int | None:
    """Announce a new run of these handlers and stages; return its epoch, which is above those of all runs alive.

    It is at least the server's time in microseconds. Returns None without the right to read the others' epochs. Without
    the right to announce the run, `keep_announced` says so. Raises RedisError.
    """
    try:
        epoch = max([server_time_us(client), *(known + 1 for known in _epochs(client, app, names))])
    except AccessDenied as error:
        _warn_denied(app, error)
        return None
    with suppress(AccessDenied):
        announce_run(client, app, names, epoch=epoch)
    return epoch


def announce_run(client: Client, app: str, names: Iterable[str], *, epoch: int) -> None:
    """Set the liveness keys of these handlers and stages to `epoch`, for half a minute. Raises RedisError."""
    commands = [("SET", worker_name_key(app, run_name(one)), epoch, "PX", _TTL_MS) for one in names]
    for reply in client.pipeline(commands):
        raise_if_error(reply)


def withdraw_run(
    client: Client, app: str, names: Iterable[str], *, epoch: int, running: Mapping[str, RunningCode]
) -> None:
    """Remove what the run of this `epoch` has reported of these handlers and stages, at its end. Raises RedisError.

    What a newer run has announced meanwhile stays. `running`: the code of the handlers.
    """
    asked = list(names)
    keys = {name: worker_name_key(app, run_name(name)) for name in asked}
    replies = client.scripts([(HOLD_NAME, (keys[name],), (epoch, 0)) for name in asked])
    ended = [name for name, was_own in zip(asked, replies, strict=True) if was_own]
    call_all(client, [("DEL", query_progress_key(app, name)) for name in ended])
    report_code(client, app, {name: one for name, one in running.items() if name in ended}, held_ms=0)


def replaced_names(client: Client, app: str, names: Sequence[str], *, epoch: int) -> set[str]:
    """Return those of `names` that a run newer than `epoch` has announced. Raises RedisError."""
    known = _epochs(client, app, names)
    return {name for name, newest in zip(names, known, strict=True) if newest > epoch}


def _epochs(client: Client, app: str, names: Sequence[str]) -> list[int]:
    replies = call_all(client, [("GET", worker_name_key(app, run_name(one))) for one in names])
    return [int(reply or 0) for reply in replies]


def keep_announced(
    url: str,
    app: str,
    names: Callable[[], Sequence[str]],
    ended: Event,
    *,
    epoch: int,
    progress: Callable[[], Mapping[str, QueryProgress]],
    running: Mapping[str, RunningCode],
    on_replaced: Callable[[set[str]], None],
) -> None:
    """Renew the liveness keys, and report the progress of the queries and the code of the handlers, until `ended`.

    It also reports the names that a newer run has announced, which stay the newer run's.

    A failure is only logged, and a refused call is repeated: fences, not these keys, protect the committed progress.
    """
    renew_in, has_warned = 0, False
    reports = _Reports(app, progress, running)
    with Client(url) as client:
        while not ended.is_set():
            try:
                current = names()
                if replaced := replaced_names(client, app, current, epoch=epoch):
                    on_replaced(replaced)
                if renew_in <= 0:
                    announce_run(client, app, [one for one in current if one not in replaced], epoch=epoch)
                    renew_in = round(_INTERVAL_S / _CHECK_S)
                reports.send(client, [one for one in current if one not in replaced])
            except AccessDenied as error:
                renew_in = round(_INTERVAL_S / _CHECK_S)
                if not has_warned:
                    _warn_denied(app, error)
                has_warned = True
            except RedisError as error:
                logger.debug("cannot write liveness keys of %s: %s; trying again", app, error)
            renew_in -= 1
            ended.wait(_CHECK_S)


class _Reports:
    """What the run reports for operators every few seconds. No failure of it reaches the announcing thread."""

    def __init__(
        self, app: str, progress: Callable[[], Mapping[str, QueryProgress]], running: Mapping[str, RunningCode]
    ) -> None:
        self._app = app
        self._progress = progress
        self._running = running
        self._is_denied = False
        self._calls = 0

    def send(self, client: Client, names: Sequence[str]) -> None:
        """Report the progress and the code of these queries, at every fifth call."""
        self._calls += 1
        if self._is_denied or self._calls % _REPORT_CALLS != 1:
            return
        try:
            report_progress(client, self._app, {name: one for name, one in self._progress().items() if name in names})
            report_code(client, self._app, {name: one for name, one in self._running.items() if name in names})
        except AccessDenied as error:
            self._is_denied = True
            logger.warning(
                "cannot report the progress and the code of %s: %s; the console does not show them; `millstream acl` "
                "prints the required rights",
                self._app,
                error,
            )
        # Java may have ended, and the session may stop, at any point: the run itself finds out and says so.
        except Exception as error:  # noqa: BLE001
            logger.debug("cannot report the progress of %s: %s; trying again", self._app, error)


def _warn_denied(app: str, error: AccessDenied) -> None:
    logger.warning(
        "cannot read or write the liveness keys of %s: %s; millstream info does not show this run, and of two runs of a "
        "stage the older one may not end",
        app,
        error,
    )
