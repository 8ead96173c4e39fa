"""RedriveReport: how far a console is with a redrive at a rate, for all operators; and the request to stop one."""

from collections.abc import Sequence

import msgspec

from millstream.delivery.expiring_members import read_members, replace_members
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.formats import progress
from millstream.redis_client.key_names import redrive_reports_key, redrive_stop_key
from millstream.redis_client.pipelining import send_all, server_time_ms

HELD_MS = 15_000
"""How long a report is kept, unless a later one replaces it."""

_STOP_KEPT_MS = 3_600_000


class RedriveReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far a redrive of a handler's dead letters is that is under way.

    * `id`: that of its record in the audit; `by`: the operator who began it, printable
    * `rate`: dead letters a second; `began_ms`: since when, in Unix milliseconds
    * `letters`: the number of dead letters it is about; `tried`: of those it has come to; `redriven`: of those that
      went back to their streams; `unknown`: of those that may have, as the connection broke before Redis replied
    """

    id: str
    by: str
    rate: float
    began_ms: int
    letters: int
    tried: int = 0
    redriven: int = 0
    unknown: int = 0

    @property
    def left(self) -> int:
        """How many dead letters it has not come to."""
        return self.letters - self.tried

    @property
    def refused(self) -> int:
        """How many it could not redrive."""
        return self.tried - self.redriven - self.unknown

    @property
    def left_ms(self) -> float:
        """How long the rest takes, in milliseconds."""
        return self.left / self.rate * 1_000

    @property
    def figures(self) -> str:
        """How many it has redriven, in words."""
        maybe = f", {self.unknown:,} may have been" if self.unknown else ""
        return progress(self.redriven, self.letters, "redriven") + maybe


def report_redrive(
    client: Client, app: str, handler: str, found: RedriveReport | None, *, earlier: RedriveReport | None = None
) -> None:
    """Replace the report of a redrive, if it has one: `earlier`. Without `found` it is removed. Raises RedisError."""
    ended = [earlier] if earlier is not None and earlier != found else []
    replace_members(
        client,
        redrive_reports_key(app, handler),
        HELD_MS,
        kept=[] if found is None else [found],
        ended=ended,
    )


def read_redrives(client: Client, app: str, handler: str) -> Sequence[RedriveReport]:
    """The redrives of a handler that consoles of this Redis are doing, those that began first before the others.

    Raises RedisError.
    """
    key, now_ms = redrive_reports_key(app, handler), server_time_ms(client)
    (found,) = read_members(client, [key], RedriveReport, now_ms, may_be_denied=False)
    # A report that its console could not remove is there beside the later one, which is kept for longer.
    return sorted({one.id: one for one, _ in found}.values(), key=lambda one: one.began_ms)


def request_stop(client: Client, app: str, redrives: Sequence[RedriveReport]) -> None:
    """Request that redrives stop, which their consoles notice within seconds. May be repeated. Raises RedisError."""
    now_ms = server_time_ms(client)
    for reply in send_all(
        client, [("SET", redrive_stop_key(app, one.id), now_ms, "PX", _STOP_KEPT_MS) for one in redrives]
    ):
        raise_if_error(reply)


def read_stops(client: Client, app: str, redrives: Sequence[RedriveReport]) -> list[bool]:
    """Whether the stop of each of these redrives was requested. Raises RedisError."""
    replies = send_all(client, [("EXISTS", redrive_stop_key(app, one.id)) for one in redrives])
    return [bool(raise_if_error(reply)) for reply in replies]
