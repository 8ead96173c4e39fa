"""Options as Spark passes them on: text under names in any case; what is wrong with one is said in one line."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from millstream.errors import ConfigError
from millstream.spark.limits import GREATEST_LONG


@dataclass(frozen=True)
class OptionParser:
    """The options that were given, under the names as the documentation writes them."""

    values: Mapping[str, str]

    @classmethod
    def read(cls, given: Mapping[str, str], names: Sequence[str], use: str, shown: int) -> "OptionParser":
        """Find the options in `names`, the first `shown` of which help where nothing is near an unknown one.

        `use`: "reading" or "writing". Raises ConfigError for an unknown or misspelt name.
        """
        known = {name.lower(): name for name in names}
        for name in given:
            if name.lower() not in known:
                raise ConfigError(_unknown(name, known, use, names[:shown]))
        return cls({known[name.lower()]: value for name, value in given.items()})

    def url(self, environ: Mapping[str, str]) -> str:
        """Where Redis is. Raises ConfigError if nothing says so."""
        url = self.text("url") or environ.get("MILLSTREAM_URL", "")
        if not url:
            raise ConfigError('say where Redis is: option("url", "redis://HOST:6379/0") or the variable MILLSTREAM_URL')
        return url

    def text(self, name: str) -> str | None:
        """The value of an option, if it was given. Raises ConfigError for an empty one."""
        value = self.values.get(name)
        if value is not None and not value.strip():
            raise ConfigError(f"option {name} is empty: leave it out or give it a value")
        return value.strip() if value is not None else None

    def number(self, name: str, least: int = 1) -> int | None:
        """The value of an option that is a whole number of `least` or more."""
        value = self.text(name)
        if value is None:
            return None
        digits = value.lstrip("0")[: len(str(GREATEST_LONG)) + 1] or "0"  # no number of Spark's is longer
        if not (value.isascii() and value.isdigit() and least <= int(digits) <= GREATEST_LONG):
            raise ConfigError(
                f"option {name}={value[:40]!r} must be a whole number of {least} or more, up to {GREATEST_LONG}"
            )
        return int(digits)

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """The value of an option that is one of several words, in any case."""
        value = (self.text(name) or default).lower()
        if value not in choices:
            raise ConfigError(f"option {name}={value!r} must be {' or '.join(choices)}{near(value, choices)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """The value of an option that is true or false."""
        return self.choice(name, ("true", "false"), "true" if default else "false") == "true"


def near(word: str, choices: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, if any is near."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def _unknown(name: str, known: Mapping[str, str], use: str, shown: Sequence[str]) -> str:
    if name.lower() == "path":
        if use == "writing":
            return 'save() and start() take no path here: name the stream by option("stream", "a") or by a column'
        return 'load() takes no path here: name the streams by option("subscribe", "a,b")'
    found = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    hint = f"did you mean {known[found[0]]!r}?" if found else f"the options for {use} are {', '.join(shown)}"
    return f"option {name!r} is unknown to redis-streams; {hint}"
