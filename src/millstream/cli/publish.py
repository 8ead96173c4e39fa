"""`millstream publish`: publishes the records of a file, or one entry, to a stream."""

import os
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from millstream.admin.time_inputs import Duration
from millstream.cli.options import Json, Url, duration, parse_fields
from millstream.cli.progress import shown_progress
from millstream.cli.records import Input, read_csv, read_jsonl
from millstream.cli.terminal import print_json, print_line, print_message
from millstream.errors import ConfigError, DecodeError, MillstreamError
from millstream.producer.bulk import Publisher
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import entry_rate, format_size, join_words, pluralize


class Format(StrEnum):
    """The format of a file."""

    CSV = "csv"
    JSONL = "jsonl"


_READERS = {Format.CSV: read_csv, Format.JSONL: read_jsonl}
_BY_SUFFIX = {".csv": Format.CSV, ".jsonl": Format.JSONL, ".ndjson": Format.JSONL}


def publish(
    stream: Annotated[str, typer.Argument(help="The stream.", metavar="STREAM")],
    source: Annotated[
        list[str] | None,
        typer.Argument(
            help="The file, or - for standard input; or the fields of one entry, each NAME=VALUE.",
            metavar="[FILE_OR_FIELD]...",
        ),
    ] = None,
    format_: Annotated[
        Format | None, typer.Option("--format", help="Its format; default: by the file's suffix.")
    ] = None,
    null: Annotated[list[str] | None, typer.Option(help="Omit fields with this value, like NA; repeatable.")] = None,
    maxlen: Annotated[int | None, typer.Option(min=1, help="Trim the stream to about this number of entries.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Maximum entries per second.")] = None,
    delay: Annotated[Duration, duration("--in", "Deliver them after this time.")] = Duration(0),
    wait: Annotated[Duration, duration("--wait", "Time to wait while Redis is unavailable or full.")] = Duration("30s"),
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Publish each record of a CSV file (first line: names) or of JSON lines as an entry of STREAM; or one entry.

    Entries are added in order, and once each, even if the connection breaks. With --in they are stored in Redis until
    they are due; a worker or pipeline that reads STREAM then moves them there.
    """
    fields = _fields_of(source or ())
    if fields is not None and (format_ is not None or null):
        raise ConfigError("--format and --null are for files: leave them out, or give a file")
    began = time.monotonic()
    client = Client(url)
    opened = partial(_open_publisher, client, stream, maxlen=maxlen, delay_ms=delay.ms, rate=rate, patience_ms=wait.ms)
    if fields is None:
        publisher, count = _publish_file(opened, source[0] if source else "-", format_, frozenset(null or ()))
    else:
        publisher, count = _publish_fields(opened, fields)
    client.close()  # not in a `with`: an interrupt must not wait for a batch in progress
    seconds = time.monotonic() - began
    rate_reached = publisher.entries / seconds
    # A delayed message gets the id of its entry when it is moved to the stream.
    first, last = ("", "") if delay else (publisher.first_id, publisher.last_id)
    if as_json:
        figures = {"entries": publisher.entries, "bytes": count, "seconds": round(seconds, 3)}
        found = {"first_id": first or None, "last_id": last or None}
        print_json({"stream": stream, **figures, "rate": round(rate_reached, 1), "delay_ms": delay.ms, **found})
    else:
        what = pluralize(publisher.entries, "entry", "entries")
        where = f"published to {stream}" + (f", due in {delay}," if delay else "")
        print_line(
            f"{what} ({format_size(count)}) {where} in {seconds:.1f} s: {entry_rate(rate_reached)}{_ids(first, last)}"
        )


def _ids(first: str, last: str) -> str:
    """The ids of the published entries, as the end of a line; "" without any."""
    if not first:
        return ""
    return f"; id {first}" if first == last else f"; ids {first} to {last}"


def _fields_of(words: Sequence[str]) -> dict[bytes, bytes] | None:
    """The fields of one entry, byte for byte as they were given; None if a file is given. Raises ConfigError."""
    if not words or "=" not in words[0].partition("/")[0]:  # ./a=b.csv is a file
        if len(words) > 1:
            wrong = words[1] if "=" not in words[1] or _is_file(words[0]) else words[0]
            raise ConfigError(f"give one file, or fields as NAME=VALUE, not {wrong!r}")
        return None
    return parse_fields(words)


def _open_publisher(client: Client, stream: str, *, patience_ms: float, **options: Any) -> Publisher:
    # Before the first entry is read, which may come much later.
    ping = partial(client.execute, "PING")
    client.retry_while_unavailable(ping, what=f"publishing to {escape(stream)}", limit_ms=patience_ms)
    return Publisher(client, stream, patience_ms=patience_ms, **options)


def _publish_fields(opened: Callable[[], Publisher], fields: Mapping[bytes, bytes]) -> tuple[Publisher, int]:
    """Publish one entry; return the publisher, and the bytes of its names and values."""
    with opened() as publisher:
        publisher.add(list(fields), list(fields.values()))
    return publisher, sum(map(len, (*fields, *fields.values())))


def _publish_file(
    opened: Callable[[], Publisher], file: str, format_: Format | None, nulls: Collection[str]
) -> tuple[Publisher, int]:
    """Publish each record of a file; return the publisher, and the bytes read."""
    chosen = format_ or _format_of(file)
    with (
        _opened(file) as descriptor,
        opened() as publisher,
        shown_progress(_size_of(descriptor), _figures(publisher)) as show,
    ):
        source = Input(descriptor, on_wait=publisher.flush, on_read=show)
        try:
            for names, values in _READERS[chosen](source, nulls):
                publisher.add(names, values)
            publisher.flush()
        except MillstreamError as error:
            _report_failure(error, publisher, file)
            raise
    return publisher, source.count


def _is_file(word: str) -> bool:
    return word == "-" or word.lower().endswith(tuple(_BY_SUFFIX)) or Path(word).exists()


def _format_of(file: str) -> Format:
    for suffix, found in _BY_SUFFIX.items():
        if file.lower().endswith(suffix):
            return found
    if file != "-" and not Path(file).exists():
        raise ConfigError(f"{file!r} is neither NAME=VALUE nor a file that ends in {join_words([*_BY_SUFFIX], 'or')}")
    name = "standard input" if file == "-" else repr(file)
    raise ConfigError(f"unknown format of {name}: add --format csv or --format jsonl")


@contextmanager
def _opened(file: str) -> Iterator[int]:
    if file == "-":
        if sys.stdin.isatty():
            print_message("reading from the terminal; Ctrl-D ends it")
        yield 0
        return
    try:
        descriptor = os.open(file, os.O_RDONLY)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(0, "it is a folder")
    except OSError as error:
        raise ConfigError(f"cannot read {file!r}: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _report_failure(error: MillstreamError, publisher: Publisher, file: str) -> None:
    """Print the number of published entries. Records before an invalid one are published, too."""
    if isinstance(error, DecodeError):
        publisher.flush()
        where = "standard input" if file == "-" else file
        error.args = (f"{where}, {error}",)
    print_message(f"{pluralize(publisher.entries, 'entry is', 'entries are')} published")


def _size_of(descriptor: int) -> int | None:
    """The size of a file; None if it is a pipe, whose size nothing knows."""
    status = os.fstat(descriptor)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _figures(publisher: Publisher) -> Callable[[], str]:
    """A function that returns published entries, and entries per second from now on."""
    began = time.monotonic()

    def text() -> str:
        rate = publisher.entries / max(time.monotonic() - began, 0.001)
        return f"{pluralize(publisher.entries, 'entry', 'entries')}  {entry_rate(rate)}"

    return text
