"""The lag of a query: how far it is behind the newest entries, by the offsets that Spark reports. No I/O."""

import json

from millstream.spark.source.offsets import unpack


def entries_behind(end: str | None, latest: str | None) -> dict[str, int | None]:
    """Return the entries between two offsets of the source, as in Spark's progress reports, by stream.

    None where unknown; empty before the first report, and for offsets of another source.
    """
    end_counts, latest_counts = _counts(end), _counts(latest)
    if not end_counts or not latest_counts:
        return {}
    return {stream: _lag(end_counts.get(stream, 0), count) for stream, count in latest_counts.items()}


def _lag(end: int | None, latest: int | None) -> int | None:
    return None if end is None or latest is None else max(0, latest - end)


def _counts(text: str | None) -> dict[str, int | None]:
    try:
        raw = unpack(json.loads(text or "null"))
        return {stream: count for stream, (_, count) in raw.items() if count is None or isinstance(count, int)}
    except (AttributeError, TypeError, ValueError):
        return {}
