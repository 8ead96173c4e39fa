"""StateOptions: the options and the columns of the `redis-state` source. `docs/spark-state.md` describes each."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from pyspark.sql.types import BinaryType, DataType, IntegerType, StringType, StructField, StructType

from millstream.errors import ConfigError
from millstream.redis_client.key_names import check_identifier, check_stream
from millstream.spark.option_parser import STATES, OptionParser

StateAs = Literal["json", "binary"]

NAMES = ("url", "handler", "streams", "stateAs", "mode", "minPartitions")

_STATE_TYPES: Mapping[StateAs, DataType] = {"json": StringType(), "binary": BinaryType()}


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """All options of the source.

    * `app`, `handler`: whose states are read; `streams`: on these streams, or on all on which it has run if empty
    * `state_as`: the type of the column `state`; `failfast`: a damaged state is an error, not null
    * `min_partitions`: how many tasks read, at least if there are so many streams
    """

    url: str = field(repr=False)
    app: str
    handler: str
    streams: tuple[str, ...] = ()
    state_as: StateAs = "json"
    failfast: bool = False
    min_partitions: int | None = None

    @property
    def schema(self) -> StructType:
        """The columns."""
        return StructType(
            [
                StructField("stream", StringType(), False),
                StructField("key", BinaryType(), False),
                StructField("state", _STATE_TYPES[self.state_as], True),
                StructField("version", IntegerType(), True),
            ]
        )

    def check_schema(self, schema: StructType) -> None:
        """Raise ConfigError if a user's schema has a column or type that the source does not have."""
        ours = {one.name: one.dataType for one in self.schema}
        for one in schema:
            if ours.get(one.name) != one.dataType:
                raise ConfigError(
                    f"redis-state has no column {one.name} of type {one.dataType.simpleString()}: remove .schema(...), or "
                    f"choose from {self.schema.simpleString()}"
                )


def parse_state_options(user_options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> StateOptions:
    """Parse the options of `spark.read`; names in any case. Raises ConfigError, one line that says what to change."""
    options = OptionParser.read(user_options, NAMES, STATES, len(NAMES))
    label = options.text("handler") or ""
    app, dot, handler = label.partition(".")
    if not dot:
        raise ConfigError(f'{label!r} names no handler: set option("handler", "APP.HANDLER"), such as shop.total')
    streams = tuple(check_stream(name.strip()) for name in (options.text("streams") or "").split(",") if name.strip())
    return StateOptions(
        url=options.url(environ),
        app=check_identifier("app", app),
        handler=check_identifier("handler", handler),
        streams=tuple(dict.fromkeys(streams)),
        state_as=cast(StateAs, options.choice("stateAs", tuple(_STATE_TYPES), "json")),
        failfast=options.choice("mode", ("permissive", "failfast"), "permissive") == "failfast",
        min_partitions=options.number("minPartitions"),
    )
