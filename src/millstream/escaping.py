"""How bytes from Redis are shown: as text that cannot harm a terminal, and in JSON without losing a bit."""

import re
from collections.abc import Sequence
from typing import Any

from millstream.errors import ConfigError

_SHORT = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|([\\nrt]))|\\")
_LONG = {"\\": b"\\", "n": b"\n", "r": b"\r", "t": b"\t"}


def visible(data: bytes | str) -> str:
    """`data` as one line of printable text, the rest escaped; `unescape` gives the same bytes back.

    Terminals obey control characters wherever they come from, so none is ever printed as it is. Text is
    taken as the command line gives it: bytes that are not UTF-8 stand in it as surrogates (PEP 383).
    """
    text = data.decode("utf-8", "surrogateescape") if isinstance(data, bytes) else data
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(_SHORT.get(c) or _escaped(c) for c in text)


def harmless(text: str) -> str:
    """`text` with its lines and backslashes as they are, and all else that is not printable escaped."""
    return text if text.isprintable() else "\n".join(map(one_line, text.split("\n")))


def one_line(text: str) -> str:
    """`text` with its backslashes as they are, and all else that is not printable escaped, ends of lines too.

    What is printed goes through this last, whatever it was made of: what `visible` has escaped stays as it is.
    """
    return text if text.isprintable() else "".join(c if c == "\\" else _SHORT.get(c) or _escaped(c) for c in text)


def unescape(text: str) -> bytes:
    r"""Read bytes in the form of `visible`: \\, \n, \r, \t and \xNN are escapes. Raises ConfigError."""

    def original(match: re.Match[str]) -> str:
        if match[1]:
            # Latin-1 keeps one character for one byte until all of it is encoded below.
            return chr(int(match[1], 16))
        if match[2]:
            return _LONG[match[2]].decode()
        raise ConfigError(rf"{text}: a backslash begins \xNN, \n, \r, \t or \\; write a single one as \\")

    plain = text.encode("utf-8", "surrogateescape").decode("latin-1")
    return _ESCAPE.sub(original, plain).encode("latin-1")


def json_value(value: Any) -> Any:
    """`value` as JSON can hold it: bytes that are not UTF-8 become {"hex": "..."}, other bytes text."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"hex": value.hex()}
    if isinstance(value, dict):
        return {
            visible(name) if isinstance(name, bytes) else str(name): json_value(content)
            for name, content in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return value


def json_fields(pairs: Sequence[bytes]) -> dict[str, Any]:
    """The fields of an entry for JSON: `fields`, and `pairs` where a mapping cannot say all.

    `pairs`, a list of [name, value], is there if a name is repeated or is not UTF-8.
    """
    names, values = [json_value(name) for name in pairs[::2]], [json_value(value) for value in pairs[1::2]]
    if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
        return {"fields": dict(zip(names, values, strict=True))}
    shown = dict(zip(map(visible, pairs[::2]), values, strict=True))
    return {"fields": shown, "pairs": list(zip(names, values, strict=True))}


def _escaped(c: str) -> str:
    if c.isprintable():
        return c
    return "".join(f"\\x{byte:02x}" for byte in c.encode("utf-8", "surrogateescape"))
