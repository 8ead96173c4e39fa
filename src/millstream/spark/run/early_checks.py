"""What can be known to be wrong before Java is started, which takes seconds: the URL, and what stages say of their inputs."""

import difflib
import logging
import re

from millstream.app import App
from millstream.errors import ConfigError, Unavailable
from millstream.handlers.stage import Input
from millstream.redis_client.client import Client
from millstream.spark.source.options import parse

logger = logging.getLogger(__name__)

_KNOCK_MS = 5_000
# Spark's own grammar is Java's: https://spark.apache.org/docs/latest/sql-ref-datatypes.html
_COLUMN = re.compile(r"\s*(`[^`]+`|\w+)\s*:?\s+(\w+)\s*((not\s+null)\s*)?(comment\s.*)?", re.IGNORECASE | re.DOTALL)
_SIMPLE = (
    "string", "binary", "boolean", "tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long", "float",
    "real", "double", "date", "timestamp",
)  # fmt: skip
_OTHERS = (
    "dec", "decimal", "numeric", "timestamp_ntz", "timestamp_ltz", "time", "varchar", "char", "character", "variant",
    "void", "interval", "array", "map", "struct", "geometry", "geography",
)  # fmt: skip


def check_early(app: App, url: str) -> None:
    """Raise ConfigError or AccessDenied for what only a person can mend; a Redis that is away is told of, and waited for."""
    for stage in app.stages.values():
        for one in stage.inputs:
            check_input(stage.label, one, url)
    with Client(url, timeout_ms=_KNOCK_MS) as client:
        try:
            client.dial().close()
        except Unavailable as error:
            logger.warning("%s; Spark is started meanwhile", error)


def check_input(label: str, one: Input, url: str) -> None:
    """Raise ConfigError if the options or column types of a stage's input cannot be meant so."""
    options = {"url": url, "subscribe": "any", **one.options}
    try:
        parse({name: text_of_option(value) for name, value in options.items() if value is not None})
        if isinstance(one.schema, str):
            _check_types(one.schema)
    except ConfigError as error:
        raise ConfigError(f"{label} cannot be made: {error}") from error


def text_of_option(value: object) -> str:
    """An option's value as Spark passes it on."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_types(schema: str) -> None:
    """Refuse a type that is none; what is not as simple as columns of fields are is left for Spark to judge."""
    columns = [_COLUMN.fullmatch(part) for part in schema.split(",")]
    for found in columns if all(columns) else ():
        assert found is not None
        name, kind = found[1], found[2].lower()
        if kind not in (*_SIMPLE, *_OTHERS):
            near = difflib.get_close_matches(kind, _SIMPLE, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields are decoded to {', '.join(_SIMPLE)}"
            raise ConfigError(f"the column {name} is of type {kind!r}, which Spark does not have; {hint}")
