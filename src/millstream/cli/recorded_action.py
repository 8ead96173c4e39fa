"""Records what a command changes in the audit, as the console records what operators change there."""

import getpass
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from millstream.admin.audit_log import AuditLog, RunningAction
from millstream.cli.terminal import print_message
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape

_MOST_NAMED = 20


@contextmanager
def recorded(client: Client, action: str, **about: str | None) -> Iterator[RunningAction]:
    """Record an action of this user before the block and its result after it; an error of the block is its result.

    `about`: the objects of the action, by name and escaped; those that are None are left out. Where Redis refuses a
    record, the action is done all the same, and a line on stderr says that it is not recorded.
    """
    by = f"{user_name()}@{socket.gethostname()}"
    given = {name: one for name, one in about.items() if one is not None}
    with AuditLog(client).action(by=by, action=action, about=given, on_unrecorded=_say_unrecorded) as running:
        yield running


def user_name() -> str:
    """The user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no user of this number
        return f"user {os.getuid()}"


def named(names: Sequence[str | bytes]) -> str:
    """The names of several objects of an action, escaped: the first ones, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(escape, names[:_MOST_NAMED])) + more


def on_stream(stream: str | None) -> str | None:
    """The stream that an option has named, escaped; None for all of them."""
    return None if stream is None else escape(stream)


def _say_unrecorded(what: str, error: RedisError) -> None:
    print_message(f"{what} is not recorded in the audit: {error}")
