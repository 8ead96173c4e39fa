"""How far a query is behind the newest entries, by the offsets that Spark reports. No I/O."""

import json

from millstream.spark.source.offsets import unpack


def behind(end: str | None, latest: str | None) -> dict[str, int | None]:
    """Entries between two offsets of the source as Spark's progress reports have them, stream by stream.

    None where that is not known; empty while nothing has been reported, and for offsets of another source.
    """
    reached, newest = _counts(end), _counts(latest)
    if not reached or not newest:
        return {}
    return {stream: _between(reached.get(stream, 0), count) for stream, count in newest.items()}


def _between(reached: int | None, newest: int | None) -> int | None:
    return None if reached is None or newest is None else max(0, newest - reached)


def _counts(text: str | None) -> dict[str, int | None]:
    try:
        raw = unpack(json.loads(text or "null"))
        return {stream: count for stream, (_, count) in raw.items() if count is None or isinstance(count, int)}
    except (AttributeError, TypeError, ValueError):
        return {}
