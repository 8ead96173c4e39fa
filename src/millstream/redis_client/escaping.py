"""Escaping of bytes from Redis: as text that is safe in a terminal, and as lossless JSON."""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from millstream.errors import ConfigError
from millstream.redis_client.replies import pairs_of

_SHORT = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|([\\nrt]))|\\")
_LONG = {"\\": b"\\", "n": b"\n", "r": b"\r", "t": b"\t"}

PART_BYTES = 65_536
"""Bytes of a large value that are processed at once."""


def escape(data: bytes | str) -> str:
    """`data` as one line of printable text, the rest escaped; `unescape` restores the same bytes.

    Terminals obey control characters wherever they come from, so none is ever printed unescaped. Text is decoded as
    on the command line: bytes that are not UTF-8 are surrogates (PEP 383).
    """
    text = data.decode("utf-8", "surrogateescape") if isinstance(data, bytes) else data
    if text.isprintable() and "\\" not in text:
        return text
    return text.translate(_ESCAPES)


def escape_fields(pairs: Sequence[bytes]) -> str:
    """The fields of an entry on one line, as `name=value`, escaped."""
    return " ".join(f"{escape(name)}={escape(value)}" for name, value in pairs_of(pairs))


def escape_lines(text: str) -> str:
    """`text` with unprintable characters escaped, except line ends; backslashes stay."""
    return text if text.isprintable() else "\n".join(map(escape_line, text.split("\n")))


def escape_line(text: str) -> str:
    """`text` with unprintable characters escaped, including line ends; backslashes stay.

    All printed text passes through it last; text already escaped by `escape` is unchanged.
    """
    return text if text.isprintable() else text.translate(_ESCAPES_OF_LINE)


def unescape(text: str) -> bytes:
    r"""The bytes of text escaped by `escape`: \\, \n, \r, \t and \xNN are escapes. Raises ConfigError."""

    def original(match: re.Match[str]) -> str:
        if match[1]:
            # Latin-1 maps one byte to one character, until the whole text is encoded below.
            return chr(int(match[1], 16))
        if match[2]:
            return _LONG[match[2]].decode()
        raise ConfigError(rf"{text}: invalid escape; use \xNN, \n, \r or \t, and write a single backslash as \\")

    plain = text.encode("utf-8", "surrogateescape").decode("latin-1")
    return _ESCAPE.sub(original, plain).encode("latin-1")


def json_value(value: Any) -> Any:
    """`value` for JSON: bytes become text, or {"hex": "..."} if they are not UTF-8."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"hex": value.hex()}
    if isinstance(value, dict):
        return {
            escape(name) if isinstance(name, bytes) else str(name): json_value(content)
            for name, content in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return value


def json_fields(pairs: Sequence[bytes]) -> dict[str, Any]:
    """The fields of an entry for JSON: `fields`, and `pairs` if a mapping would lose data.

    `pairs`, a list of [name, value], is present if a name is repeated or is not UTF-8.
    """
    values = [json_value(value) for value in pairs[1::2]]
    shown, names = _names(pairs[::2])
    fields = {"fields": dict(zip(shown, values, strict=True))}
    return {**fields, "pairs": list(zip(names, values, strict=True))} if names else fields


def iter_json_fields(pairs: Sequence[bytes], part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """`json_fields(pairs)` as ASCII JSON without its braces, in parts, for entries that would block other tasks.

    Each part comes from at most `part_bytes` bytes of a value. An empty part means that as many bytes were only
    validated.
    """
    shown, names = _names(pairs[::2])
    last = dict(zip(shown, pairs[1::2], strict=True))
    yield b'"fields":{'
    for index, (name, value) in enumerate(last.items()):
        yield b"%s%s:" % (b"," if index else b"", _dump(name))
        yield from _value_in_parts(value, part_bytes)
    yield b"}"
    if names:
        yield b',"pairs":['
        for index, (exact, value) in enumerate(zip(names, pairs[1::2], strict=True)):
            yield b"%s[%s," % (b"," if index else b"", _dump(exact))
            yield from _value_in_parts(value, part_bytes)
            yield b"]"
        yield b"]"


def _names(raw: Sequence[bytes]) -> tuple[list[str], list[Any]]:
    """Names as keys of a mapping; and the exact names if they differ from these, else an empty list."""
    names = [json_value(name) for name in raw]
    if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
        return names, []
    return list(map(escape, raw)), names


def _value_in_parts(value: bytes, part_bytes: int) -> Iterator[bytes]:
    if len(value) <= part_bytes:
        yield _dump(json_value(value))
        return
    parts = [(start, start + part_bytes) for start in range(0, len(value), part_bytes)]
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start, end in parts:
            decoder.decode(value[start:end], final=end >= len(value))
            yield b""
    except UnicodeDecodeError:
        yield b'{"hex":"'
        for start, end in parts:
            yield value[start:end].hex().encode()
        yield b'"}'
        return
    decoder.reset()
    yield b'"'
    for start, end in parts:
        yield _dump(decoder.decode(value[start:end], final=end >= len(value)))[1:-1]
    yield b'"'


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class _Escapes(dict[int, str]):
    """The table of `str.translate`, filled on demand: many times as fast as a call for each character of a value."""

    def __init__(self, *, kept: str = "") -> None:
        super().__init__()
        self._kept = kept

    def __missing__(self, code: int) -> str:
        c = chr(code)
        found = c if c in self._kept else _SHORT.get(c) or _escaped(c)
        if code < 256 or 0xDC80 <= code <= 0xDCFF:  # bytes, of which values are full that are not text
            self[code] = found
        return found


_ESCAPES, _ESCAPES_OF_LINE = _Escapes(), _Escapes(kept="\\")


def _escaped(c: str) -> str:
    if c.isprintable():
        return c
    # Errors may quote a lone surrogate that stands for no byte.
    how = "surrogateescape" if "\udc80" <= c <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in c.encode("utf-8", how))
