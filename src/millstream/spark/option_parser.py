"""OptionParser: options as Spark passes them, text under names in any case. Each error is one line."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from millstream.errors import ConfigError, did_you_mean
from millstream.redis_client import DEFAULT_URL
from millstream.spark.greatest_numbers import MAX_LONG

STATES = "reading states"
"""The use of options of the source `redis-state`."""

_NO_PATH = {
    "reading": 'load() takes no path here: name the streams by option("subscribe", "a,b")',
    "writing": 'save() and start() take no path here: name the stream by option("stream", "a") or by a column',
    STATES: 'load() takes no path here: name the handler by option("handler", "APP.HANDLER")',
}


@dataclass(frozen=True)
class OptionParser:
    """The options that the user set, under their names as documented."""

    values: Mapping[str, str]

    @classmethod
    def read(cls, user_options: Mapping[str, str], names: Sequence[str], use: str, shown: int) -> "OptionParser":
        """Match `user_options` against the option names in `names`. Raises ConfigError for an unknown or misspelt name.

        `use`: "reading", "writing" or `STATES`. `shown`: how many of `names` the error lists where no name is similar.
        """
        known = {name.lower(): name for name in names}
        for name in user_options:
            if name.lower() not in known:
                raise ConfigError(_unknown(name, known, use, names[:shown]))
        return cls({known[name.lower()]: value for name, value in user_options.items()})

    def url(self, environ: Mapping[str, str]) -> str:
        """The URL of Redis: the option, or MILLSTREAM_URL, or that of a server on the same machine, as for producers."""
        return self.text("url") or environ.get("MILLSTREAM_URL") or DEFAULT_URL

    def text(self, name: str) -> str | None:
        """The value of an option; None if it is not set. Raises ConfigError for an empty one."""
        value = self.values.get(name)
        if value is not None and not value.strip():
            raise ConfigError(f"option {name} is empty: remove it or set a value")
        return value.strip() if value is not None else None

    def number(self, name: str, minimum: int = 1) -> int | None:
        """The value of an option that must be a whole number of `minimum` or more; None if it is not set."""
        value = self.text(name)
        if value is None:
            return None
        digits = value.lstrip("0")[: len(str(MAX_LONG)) + 1] or "0"  # int() of a very long text is slow
        if not (value.isascii() and value.isdigit() and minimum <= int(digits) <= MAX_LONG):
            raise ConfigError(
                f"option {name}={value[:40]!r} must be a whole number of {minimum} or more, up to {MAX_LONG}"
            )
        return int(digits)

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """The value of an option that must be one of `choices`, in any case."""
        value = (self.text(name) or default).lower()
        if value not in choices:
            raise ConfigError(f"option {name}={value!r} must be {' or '.join(choices)}{suggestion(value, choices)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """The value of an option that must be true or false."""
        return self.choice(name, ("true", "false"), "true" if default else "false") == "true"


def suggestion(word: str, choices: Iterable[str]) -> str:
    """The end of an error about an unknown word: the most similar of `choices`, or "" if none is similar."""
    hint = did_you_mean(word, choices)
    return f"; {hint}" if hint else ""


def _unknown(name: str, known: Mapping[str, str], use: str, shown: Sequence[str]) -> str:
    if name.lower() == "path":
        return _NO_PATH.get(use, _NO_PATH["reading"])
    matches = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    hint = f"did you mean {known[matches[0]]!r}?" if matches else f"the options for {use} are {', '.join(shown)}"
    return f"option {name!r} is unknown to {'redis-state' if use == STATES else 'redis-streams'}; {hint}"
