"""`millstream class-archive`: writes the archive from which Spark's Java process starts more quickly."""

import signal
from dataclasses import asdict

import typer

from millstream.cli.options import Json
from millstream.cli.signals import interrupted_at_signals
from millstream.cli.terminal import print_json, print_line, print_message
from millstream.redis_client.formats import format_size


def class_archive(as_json: Json = False) -> None:
    """Write the class archive from which millstream run starts Spark's Java process in about half of the time.

    It is for runs on one machine, by the same user, with the same Java and the same PySpark; after an update of one of
    them, write it again. It has some 170 MB in $XDG_CACHE_HOME or ~/.cache. Needs no Redis, and takes a minute.
    """
    from millstream.spark.run.class_archive import write_class_archive

    with interrupted_at_signals() as received:
        try:
            written = write_class_archive(print_message)
        except KeyboardInterrupt:
            print_message("it was stopped, and no class archive was written")
            if signal.SIGINT in received:
                raise
            raise typer.Exit(1) from None
    if as_json:
        print_json({**asdict(written), "path": str(written.path)})
    else:
        print_line(f"{written.path}: {format_size(written.size_bytes)}, written in {written.seconds:.0f} s")
