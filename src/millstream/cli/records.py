"""Readers of CSV and JSON lines: yield records of field names and values, as bytes or as text to encode as UTF-8."""

import csv
import io
import select
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec

from millstream.errors import DecodeError

Record = tuple[Sequence[str | bytes], Sequence[str | bytes]]

_HUGE = 512 * 1024 * 1024  # no value in Redis is larger
_BUFFER = 256 * 1024

_parse_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_parse_text = msgspec.json.Decoder(str).decode


class Input(io.RawIOBase):
    """The bytes of the file or pipe `descriptor`, with callbacks at each read.

    `on_wait` is called before a read that has to wait for input, `on_read` after each read with `count`, the bytes read
    so far.
    """

    def __init__(self, descriptor: int, *, on_wait: Callable[[], None], on_read: Callable[[int], None]) -> None:
        self._file = io.FileIO(descriptor, closefd=False)
        self._on_wait = on_wait
        self._on_read = on_read
        self.count = 0

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read the available bytes, up to the size of `buffer`."""
        if not select.select([self._file], [], [], 0)[0]:
            self._on_wait()
        count = self._file.readinto(buffer)
        self.count += count or 0
        self._on_read(self.count)
        return count


def read_csv(source: io.RawIOBase, nulls: Collection[str]) -> Iterator[Record]:
    """The records of a CSV file whose first line names the fields; fields with a value in `nulls` are omitted.

    The bytes of names and values stay as they are, whatever the encoding. Raises DecodeError with the line number.
    """
    csv.field_size_limit(min(_HUGE, sys.maxsize))
    # Latin-1 maps every byte to one character; ASCII text is the same in UTF-8.
    text = io.TextIOWrapper(io.BufferedReader(source, _BUFFER), encoding="latin-1", newline="")
    markers = {marker.encode("utf-8", "surrogateescape").decode("latin-1") for marker in nulls}
    reader = csv.reader(text, strict=True)
    line = 1
    try:
        header = next(reader, None)
        if header is None or not any(header):
            raise DecodeError("line 1: a CSV file must begin with a line of field names")
        header[0] = header[0].removeprefix("ï»¿")  # a byte order mark
        names = tuple(_exact(header))
        line = reader.line_num + 1
        for row in reader:
            if len(row) == len(names):
                values = _exact(row)
                if markers.isdisjoint(row):
                    yield names, values
                else:
                    kept = [i for i, cell in enumerate(row) if cell not in markers]
                    yield _filled(line, tuple([names[i] for i in kept])), [values[i] for i in kept]
            elif row:
                raise DecodeError(f"line {line}: {len(row)} values, but the first line names {len(names)} fields")
            line = reader.line_num + 1
    except csv.Error as error:
        raise DecodeError(f"line {line}: {error}") from error


def read_jsonl(source: io.RawIOBase, nulls: Collection[str]) -> Iterator[Record]:
    """The records of a file with a JSON object on each line; fields that are null or a text in `nulls` are omitted.

    Texts become their content; numbers, booleans and nested values stay as written. Raises DecodeError with the line
    number.
    """
    for number, line in enumerate(io.BufferedReader(source, _BUFFER), 1):
        if line.isspace():
            continue
        try:
            found = {name: _json_text(raw) for name, raw in _parse_object(line).items()}
        except msgspec.DecodeError as error:
            raise DecodeError(f"line {number}: not a JSON object ({error})") from error
        kept = {name: value for name, value in found.items() if value is not None and value not in nulls}
        yield _filled(number, tuple(kept)), list(kept.values())


def _exact(cells: list[str]) -> Sequence[str | bytes]:
    return cells if "".join(cells).isascii() else [cell.encode("latin-1") for cell in cells]


def _filled(line: int, names: tuple[str | bytes, ...]) -> tuple[str | bytes, ...]:
    if not names:
        raise DecodeError(f"line {line}: every value is missing, and an entry needs at least one field")
    return names


def _json_text(raw: msgspec.Raw) -> str | bytes | None:
    text = bytes(raw)
    if text.startswith(b'"'):
        return _parse_text(text)
    return None if text == b"null" else text
