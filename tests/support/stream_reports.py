"""Reports of streams, as an inspection makes them."""

from millstream.admin.inspection import inspect
from millstream.admin.reports import GroupReport, StreamReport
from millstream.redis_client.client import Client


def counted(client: Client, handler: str) -> list[tuple[int, int]]:
    """How many messages a handler has committed, and how many of them it has processed, on each stream."""
    return [(one.committed, one.processed) for one in inspect(client).handlers if one.handler == handler]


def stream(name: str, added: int, *groups: GroupReport, first: int = 1, length: int | None = None) -> StreamReport:
    """A stream to which so many entries were ever added, with consecutive ids."""
    count = added if length is None else length
    return StreamReport(
        name=name,
        length=count,
        added=added,
        first_id=f"{first}-0" if count else None,
        last_id=f"{first + count - 1}-0" if count else None,
        last_generated_id=f"{first + count - 1}-0",
        oldest_age_ms=None,
        groups=groups,
    )
