"""Numbers, sizes, durations, times and lists of words as people read them, on screens and in findings."""

from collections.abc import Sequence
from datetime import UTC, datetime


def format_age(duration_ms: float | None) -> str:
    """A duration in milliseconds, formatted in a fitting unit; "-" for None."""
    if duration_ms is None:
        return "-"
    seconds = duration_ms / 1000
    for unit, length in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= length * 2:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"


def format_run_time(duration_ms: float | None) -> str:
    """The duration of a run, in milliseconds, with three digits below a second; otherwise as `format_age`."""
    return f"{duration_ms:.3g} ms" if duration_ms is not None and duration_ms < 999.5 else format_age(duration_ms)


def format_time(unix_ms: float) -> str | None:
    """A moment in ISO 8601, with milliseconds, in UTC; None if it is beyond the year 9999."""
    try:
        moment = datetime.fromtimestamp(unix_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def format_count(number: float) -> str:
    """A number of up to 10**13 in six or seven characters: whole numbers below 100,000 exactly, others rounded."""
    if number < 100_000:
        return f"{number:,.1f}" if isinstance(number, float) and number < 100 else f"{number:,.0f}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if number < size * 1000 or unit == "G":
            break
    return f"{number / size:,.1f}{unit}" if number < size * 100 else f"{number / size:,.0f}{unit}"


def format_size(count: float) -> str:
    """A number of bytes, formatted in a fitting unit."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def pluralize(number: int, thing: str, things: str = "") -> str:
    """A number with its noun in singular or plural: `1 entry`, `2 entries`."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def entry_rate(per_s: float) -> str:
    """Entries per second, as a whole number: `1 entry/s`, `2 entries/s`."""
    return f"{pluralize(round(per_s), 'entry', 'entries')}/s"


def join_words(words: Sequence[str], conjunction: str) -> str:
    """Return words as a sentence lists them, like "a, b or c"."""
    *some, last = words
    return f"{', '.join(some)} {conjunction} {last}" if some else last


def progress(done: int, total: int, verb: str) -> str:
    """How far an action is: `2 of 1,000 redriven`."""
    return f"{done:,} of {total:,} {verb}"
