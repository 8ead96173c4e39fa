"""Checks before Spark starts, which takes seconds: the URL of Redis, and the inputs of stages."""

import logging
import re

from millstream.admin.server_checks import warn_of_data_loss
from millstream.app import App
from millstream.errors import ConfigError, Unavailable, did_you_mean
from millstream.handlers.stage import Input
from millstream.redis_client.client import Client
from millstream.spark.source.options import parse

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_MS = 5_000
# Spark's own grammar is Java's: https://spark.apache.org/docs/latest/sql-ref-datatypes.html
_COLUMN = re.compile(r"\s*(`[^`]+`|\w+)\s*:?\s+(\w+)\s*((not\s+null)\s*)?(comment\s.*)?", re.IGNORECASE | re.DOTALL)
_SIMPLE = (
    "string",
    "binary",
    "boolean",
    "tinyint",
    "byte",
    "smallint",
    "short",
    "int",
    "integer",
    "bigint",
    "long",
    "float",
    "real",
    "double",
    "date",
    "timestamp",
)
_OTHERS = (
    "dec",
    "decimal",
    "numeric",
    "timestamp_ntz",
    "timestamp_ltz",
    "time",
    "varchar",
    "char",
    "character",
    "variant",
    "void",
    "interval",
    "array",
    "map",
    "struct",
    "geometry",
    "geography",
)


def check_early(app: App, url: str) -> None:
    """Raise ConfigError or AccessDenied for what only an operator can fix.

    An unavailable Redis, and settings of Redis that lose data, are only logged.
    """
    for stage in app.stages.values():
        for one in stage.inputs:
            check_input(stage.label, one, url)
    with Client(url, timeout_ms=_CONNECT_TIMEOUT_MS) as client:
        try:
            client.dial().close()
        except Unavailable as error:
            logger.warning("%s; starting Spark meanwhile", error)
        else:
            warn_of_data_loss(client)


def check_input(label: str, one: Input, url: str) -> None:
    """Raise ConfigError if the options or column types of a stage's input are invalid."""
    options = {"url": url, "subscribe": "any", **one.options}
    try:
        parse({name: text_of_option(value) for name, value in options.items() if value is not None})
        if isinstance(one.schema, str):
            _check_types(one.schema)
    except ConfigError as error:
        raise ConfigError(f"{label} cannot be built: {error}") from error


def text_of_option(value: object) -> str:
    """Return an option's value as the text that Spark passes on."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_types(schema: str) -> None:
    """Raise ConfigError for an unknown type; Spark itself checks schemas beyond simple columns."""
    columns = [_COLUMN.fullmatch(part) for part in schema.split(",")]
    for found in columns if all(columns) else ():
        assert found is not None
        name, kind = found[1], found[2].lower()
        if kind not in (*_SIMPLE, *_OTHERS):
            hint = did_you_mean(kind, _SIMPLE, f"fields are decoded to {', '.join(_SIMPLE)}")
            raise ConfigError(f"column {name} has the type {kind!r}, which Spark does not know; {hint}")
