"""Display: shows or hides data from Redis in a page.

All data passes through here on its way to a page: `redact` first, then the limit of its size. The templates escape it.
"""

import json
from collections.abc import Sequence
from typing import Any

from millstream.admin.value_redaction import Redact, show_all
from millstream.redis_client.escaping import escape, escape_lines, json_value
from millstream.redis_client.redaction import redact_text
from millstream.redis_client.replies import pairs_of

SHOWN_CHARS = 65_536
"""A longer value is cut."""


class Display:
    """Makes the texts of a page. `redact` is applied to all of them."""

    def __init__(self, redact: Redact = show_all) -> None:
        self.redact = redact

    def text(self, value: str | None, name: str = "sentence") -> str:
        """A sentence, an error or a traceback that may quote what messages contain. Passwords of URLs are removed."""
        return "" if value is None else _cut(self.redact(name, redact_text(escape_lines(value))))

    def value(self, name: str, value: bytes) -> str:
        """The value of a field, as one printable text."""
        return self.value_of((name,), value)

    def value_of(self, names: Sequence[str], value: bytes) -> str:
        """The value of all these fields, hidden if that of one of them is."""
        return _cut(self._redact_by(names, escape(value)))

    def fields(self, pairs: Sequence[bytes]) -> list[tuple[str, str]]:
        """Names and values of an entry."""
        return [(_cut(escape(name)), self.value(escape(name), value)) for name, value in pairs_of(pairs)]

    def key(self, key: bytes | None) -> str:
        """A key; "(no key)" for a message without one."""
        return "(no key)" if key is None else self.value("key", key)

    def is_shown(self, key: bytes | None) -> bool:
        """Whether a key is shown as it is, so that it may be in a link or a command."""
        return key is not None and self.key(key) == escape(key)

    def state(self, state: dict[str, Any]) -> str:
        """A state, as JSON. Each of its values is redacted by its own name and those of all that it is in."""
        return _cut(json.dumps(self._redacted((), json_value(state)), indent=2, ensure_ascii=False))

    def _redacted(self, names: tuple[str, ...], value: Any) -> Any:
        """A value as it is shown; `names`: those of all that it is in, the outermost first, then its own."""
        if isinstance(value, dict):
            return {
                self._redact_by(names, escape(one)): self._redacted((*names, escape(one)), content)
                for one, content in value.items()
            }
        if isinstance(value, list):
            return [self._redacted(names, one) for one in value]
        shown = value if isinstance(value, str) else json.dumps(value)
        redacted = self._redact_by(names, shown)
        return value if redacted == shown else redacted

    def _redact_by(self, names: Sequence[str], text: str) -> str:
        for name in names:
            text = self.redact(name, text)
        return text


def _cut(text: str) -> str:
    more = len(text) - SHOWN_CHARS
    return text if more <= 0 else f"{text[:SHOWN_CHARS]}… ({more:,} more characters are not shown)"
