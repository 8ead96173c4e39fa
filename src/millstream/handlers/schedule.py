"""Schedule: a recurring message of an app: when it fires, and the function that returns the message of a firing."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from millstream.errors import ConfigError
from millstream.handlers.firing_times import FiringTimes, parse_firing_times
from millstream.handlers.handler import is_plain, name_of_function
from millstream.redis_client.key_names import check_stream, is_pattern

Missed = Literal["once", "all", "skip"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule of an app; `App.every` says what its options mean.

    * `app`, `name`: they name the record of its last firing in Redis: do not change them lightly
    * `times`: when it fires; `rule`: the same as text, which changes when the schedule does
    * `takes_time`: its function takes the time of the firing
    """

    app: str
    name: str
    function: Callable[..., Any]
    stream: str
    times: FiringTimes
    rule: str
    missed: Missed = "once"
    takes_time: bool = False

    @property
    def label(self) -> str:
        """`app.schedule`, its name in logs and Redis."""
        return f"{self.app}.{self.name}"

    def message(self, firing_ms: int) -> object:
        """Call the function for a firing; return what it returns. Raises whatever it raises."""
        return self.function(self.times.local_time(firing_ms)) if self.takes_time else self.function()


def compile_schedule(
    app: str,
    function: Callable[..., Any],
    when: str,
    *,
    stream: str,
    timezone: str | None,
    missed: Missed,
    name: str | None,
) -> Schedule:
    """Check a schedule once, when its app is loaded. Raises ConfigError with one line on what to change."""
    own = name_of_function("schedule", function, name)
    where = f"schedule {own!r}"
    if not isinstance(stream, str) or not stream or is_pattern(stream):
        raise ConfigError(f'{where}: stream must be the name of one stream, as in stream="reports"')
    if missed not in get_args(Missed):
        raise ConfigError(f"{where}: missed must be one of {', '.join(get_args(Missed))}, not {missed!r}")
    try:
        times = parse_firing_times(when, timezone)
    except ConfigError as error:
        raise ConfigError(f"{where}: {when!r}: {error}") from error
    return Schedule(
        app=app,
        name=own,
        function=function,
        stream=check_stream(stream),
        times=times,
        rule=" ".join([*when.split(), timezone or ""]).strip(),
        missed=missed,
        takes_time=_takes_time(where, function),
    )


def _takes_time(where: str, function: Callable[..., Any]) -> bool:
    """Return whether the function takes one argument. Raises ConfigError if it is no plain function of none or one."""
    if not is_plain(function):
        raise ConfigError(
            f"{where}: its function must be a plain one that returns a message, neither async nor a generator"
        )
    kinds = [one.kind for one in inspect.signature(function).parameters.values()]
    if len(kinds) > 1 or inspect.Parameter.KEYWORD_ONLY in kinds:
        raise ConfigError(
            f"{where}: its function takes nothing, or the time of the firing by position; it has {len(kinds)} parameters"
        )
    return len(kinds) == 1
