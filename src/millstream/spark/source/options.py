"""SourceOptions: the options of the `redis-streams` source, parsed from text and checked.

Names follow Spark's Kafka source where the meaning is the same. `docs/spark-source.md` describes each.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from millstream.errors import ConfigError
from millstream.redis_client.key_names import check_identifier
from millstream.spark.option_parser import OptionParser
from millstream.spark.source.offset_bounds import DEFAULT_BOUNDS, OffsetBounds, Timestamp, check_order, read_bounds

FieldsAs = Literal["array", "map", "json"]
LateStart = Literal["error", "latest"]

NAMES = (
    "url",
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "startingGroup",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "targetBatchDuration",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "group",
    "readAs",
    "consumer",
    "claimAfter",
    "readFrom",
    "fieldsAs",
    "mode",
    "redriven",
    "pushDownPredicate",
    "availableNow",
    "assign",
    "layout",
    "subscribeAnnounced",
    "subscribePartitions",
    "keyField",
    "buckets",
    "committedApp",
    "committedHandler",
)
_NAMES_SHOWN = 26
_UNITS_MS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_SHARED_ONLY = ("consumer", "claimAfter")
_LOG_ONLY = ("startingGroup", "committedApp")
_SHARED_BATCH = 10_000
_MIN_CLAIM_MS = 1_000
_MIN_TARGET_MS = 100
_PACKED_ONLY = ("keyField", "buckets")
_COLUMNS_ONLY = ("fieldsAs", "mode", "redriven")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Entries per batch, tasks per batch, entries per task; None = no limit.

    A batch of fewer than `min_per_trigger` entries waits for more, until `max_delay_ms` after the last batch. Batches
    have fewer than `max_per_trigger` entries where they would take longer than `target_ms`.
    """

    max_per_trigger: int | None = None
    min_per_trigger: int | None = None
    max_delay_ms: float = 900_000.0
    target_ms: float | None = None
    min_partitions: int | None = None
    max_per_partition: int | None = None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How entries become rows.

    * `fields_as`: the type of the column `fields`
    * `failfast`: a value that does not fit its typed column is an error, not null
    * `skip_redriven`: skip entries that are for one handler alone: redriven ones, and those of timers
    * `packed`: blocks of messages for the handler engine, with the value of `key_field` as the key, in `buckets`
    """

    fields_as: FieldsAs = "array"
    failfast: bool = False
    skip_redriven: bool = False
    packed: bool = False
    key_field: str | None = None
    buckets: int = 1


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Reading through a consumer group that the query shares with other consumers.

    * `group`: its name
    * `consumer`: the query's consumer name; unique in the group, and the same after a restart
    * `claim_idle_ms`: idle time after which the query claims a pending entry of another consumer
    """

    group: str
    consumer: str = "spark"
    claim_idle_ms: int = 300_000


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """All options of the source.

    * `service`: the service that the streams are announced to; `partitioned_streams`: the partitioned streams to read
    * `late_start`: for streams with no entry at or after the starting time: fail, or begin at the end; None = default
    * `starting_group`: the consumer group that startingOffsets=group begins at
    * `push_down`: filters of a batch read limit what it reads from Redis
    * `available_now`: a streaming query ends at the entries that are there when it starts; None = not set
    * `handler`: the app and handler whose commits the query follows
    * `from_replicas`: tasks read entries from replicas that are up to date
    * `group`: the consumer group that shows the query's progress; "" = none, None = not set (by a batch read)
    * `sharing`: read through a group; None = read all entries, and show the progress in `group`
    """

    url: str = field(repr=False)
    streams: tuple[str, ...] = ()
    pattern: str | None = None
    service: str | None = None
    partitioned_streams: tuple[str, ...] = ()
    starting: OffsetBounds = DEFAULT_BOUNDS
    late_start: LateStart | None = None
    starting_group: str | None = None
    ending: OffsetBounds = DEFAULT_BOUNDS
    limits: Limits = Limits()
    fail_on_data_loss: bool = True
    group: str | None = None
    columns: Columns = Columns()
    push_down: bool = False
    available_now: bool | None = None
    from_replicas: bool = False
    handler: tuple[str, str] | None = None
    sharing: Sharing | None = None

    def check_streaming(self) -> None:
        """Raise ConfigError for options that only a batch read supports, or without a group for the progress.

        A group that queries share by default would show the progress of one of them, and entries that another has not
        read yet could be trimmed. (Kafka's consumers have no default `group.id` for this reason, by KIP-289.)
        """
        if why := self._why_not_streaming():
            raise ConfigError(why)
        if self.group is None:
            raise ConfigError(
                "a streaming query shows in a consumer group how far it is, so that trimming by groups, as `millstream "
                'worker --trim` does it, keeps what it has not read: name one by option("group", NAME), for each query '
                'of a stream another, or "" to show no progress'
            )

    def check_batch(self) -> None:
        """Raise ConfigError for options that only a streaming query supports."""
        if why := self._why_not_batch():
            raise ConfigError(why)

    def check_either(self) -> None:
        """Raise ConfigError for options that neither a batch read nor a streaming query supports together."""
        batch, streaming = self._why_not_batch(), self._why_not_streaming()
        if batch and streaming:
            raise ConfigError(f"these options cannot be combined: {batch}; but {streaming}")

    def _why_not_streaming(self) -> str | None:
        if self.ending != DEFAULT_BOUNDS:
            return "endingOffsets and endingTimestamp are for spark.read: a streaming query does not end"
        if self.push_down:
            return "pushDownPredicate is for spark.read: Spark passes no filters to a streaming source"
        return None

    def _why_not_batch(self) -> str | None:
        if self.sharing is not None:
            return "readAs=group is for spark.readStream: spark.read acknowledges nothing"
        if self.starting.are_all("latest", self.streams):
            return "startingOffsets=latest leaves nothing to read for spark.read: use earliest or an id"
        if self.limits.max_per_trigger is not None:
            return "maxOffsetsPerTrigger is for spark.readStream; spark.read ends at endingOffsets"
        if self.available_now is not None:
            return "availableNow is for spark.readStream; spark.read ends at endingOffsets"
        if self.limits.target_ms is not None:
            return "targetBatchDuration is for spark.readStream: spark.read has one batch"
        if self.limits.min_per_trigger is not None:
            return "minOffsetsPerTrigger is for spark.readStream; spark.read does not wait for entries"
        return None


def parse(user_options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> SourceOptions:
    """Parse the options of `spark.read` or `spark.readStream`; names in any case.

    Raises ConfigError, one line that says what to change, for an option that is unknown or misspelt, contradicts
    another or has an invalid value.
    """
    options = OptionParser.read(user_options, NAMES, "reading", _NAMES_SHOWN)
    url = options.url(environ)
    announced, bases = options.text("subscribeAnnounced"), options.text("subscribePartitions")
    streams, pattern = ((), None) if announced or bases else _subscription(options)
    committed_by = _committed_by(options)
    sharing = _sharing(options)
    places = ("group", *(("committed",) if committed_by else ())) if sharing is None else ()
    words = ("earliest", "latest", *places)
    starting = read_bounds(options, "starting", streams, words)
    ending = read_bounds(options, "ending", streams, ("latest",))
    check_order(starting, ending, streams)
    parsed = SourceOptions(
        url=url,
        streams=streams,
        pattern=pattern,
        service=announced,
        partitioned_streams=tuple((bases or "").split(",")) if bases else (),
        starting=starting,
        late_start=_late_start(options, starting),
        starting_group=_starting_group(options, starting),
        ending=ending,
        limits=_limits(options, maximum=None if sharing is None else _SHARED_BATCH),
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        group=options.values.get("group"),
        columns=_columns(options),
        push_down=options.flag("pushDownPredicate", False),
        available_now=options.flag("availableNow", False) if "availableNow" in options.values else None,
        from_replicas=options.choice("readFrom", ("primary", "replica"), "primary") == "replica",
        handler=committed_by,
        sharing=sharing,
    )
    parsed.check_either()
    return parsed


def _subscription(options: OptionParser) -> tuple[tuple[str, ...], str | None]:
    if "assign" in options.values:
        raise ConfigError(
            "option assign names partitions, which a stream does not have: name whole streams by "
            'option("subscribe", "a,b"), and the start of each by startingOffsets'
        )
    listed, pattern = options.text("subscribe"), options.text("subscribePattern")
    if (listed is None) == (pattern is None):
        raise ConfigError(
            'to read, name the streams either by option("subscribe", "a,b") or by '
            'option("subscribePattern", "prefix:*")' + (", not by both" if listed else "")
        )
    names = tuple(dict.fromkeys(name.strip() for name in (listed or "").split(",") if name.strip()))
    if listed and not names:
        raise ConfigError(f"option subscribe={listed!r} names no stream")
    return names, pattern


def _sharing(options: OptionParser) -> Sharing | None:
    shared = options.choice("readAs", ("log", "group"), "log") == "group"
    for name in _LOG_ONLY if shared else _SHARED_ONLY:
        if name in options.values:
            raise ConfigError(f"option {name} needs readAs={'log' if shared else 'group'}")
    if not shared:
        return None
    if (group := options.text("group")) is None:
        raise ConfigError('readAs=group: name the consumer group to share by option("group", NAME)')
    after = options.text("claimAfter")
    after_ms = Sharing.claim_idle_ms if after is None else _duration_ms("claimAfter", after)
    if after_ms < _MIN_CLAIM_MS:
        raise ConfigError(f"option claimAfter={after!r} must be 1s or more: longer than a consumer needs for an entry")
    consumer = check_identifier("consumer name", options.text("consumer") or Sharing.consumer)
    return Sharing(group=group, consumer=consumer, claim_idle_ms=after_ms)


def _limits(options: OptionParser, *, maximum: int | None) -> Limits:
    maximum, minimum = options.number("maxOffsetsPerTrigger") or maximum, options.number("minOffsetsPerTrigger")
    if maximum is not None and minimum is not None and minimum > maximum:
        raise ConfigError(f"minOffsetsPerTrigger={minimum} must not be more than maxOffsetsPerTrigger={maximum}")
    delay = options.text("maxTriggerDelay")
    if delay is not None and minimum is None:
        raise ConfigError("option maxTriggerDelay limits the wait of minOffsetsPerTrigger: set that one too")
    target = options.text("targetBatchDuration")
    if target is not None and maximum is None:
        raise ConfigError(
            "option targetBatchDuration makes batches smaller than maxOffsetsPerTrigger: set that one too"
        )
    return Limits(
        max_per_trigger=maximum,
        target_ms=None if target is None else _target_ms(target),
        min_per_trigger=minimum,
        max_delay_ms=Limits.max_delay_ms if delay is None else _duration_ms("maxTriggerDelay", delay),
        min_partitions=options.number("minPartitions"),
        max_per_partition=options.number("maxRecordsPerPartition"),
    )


def _target_ms(text: str) -> int:
    target_ms = _duration_ms("targetBatchDuration", text)
    if target_ms < _MIN_TARGET_MS:
        raise ConfigError(f"option targetBatchDuration={text!r} must be 100ms or more")
    return target_ms


def _duration_ms(name: str, text: str) -> int:
    """Parse a duration as Spark writes it: 15m, 30s, 500ms; a number alone is milliseconds."""
    found = re.fullmatch(r"(\d{1,12})\s*([a-z]*)", text.lower(), re.ASCII)
    if found is None or found[2] not in _UNITS_MS:
        raise ConfigError(f"option {name}={text!r} must be a time like 15m, 30s or 500ms")
    return int(found[1]) * _UNITS_MS[found[2]]


def _late_start(options: OptionParser, starting: OffsetBounds) -> LateStart | None:
    name = "startingOffsetsByTimestampStrategy"
    if name not in options.values:
        return None
    if not any(isinstance(bound, Timestamp) for bound in (starting.default, *starting.streams.values())):
        raise ConfigError(f"option {name} needs startingTimestamp or startingOffsetsByTimestamp: set one of them")
    return cast(LateStart, options.choice(name, ("error", "latest"), "error"))


def _starting_group(options: OptionParser, starting: OffsetBounds) -> str | None:
    named = options.text("startingGroup")
    if not starting.mentions("group"):
        if named is not None:
            raise ConfigError("option startingGroup needs startingOffsets=group: set that one too")
        return None
    group = named or options.values.get("group")
    if not group:
        raise ConfigError(
            'startingOffsets=group: name the group by option("startingGroup", NAME), or that of the query by '
            'option("group", NAME)'
        )
    return group


def _committed_by(options: OptionParser) -> tuple[str, str] | None:
    app, handler = options.text("committedApp"), options.text("committedHandler")
    if (app is None) != (handler is None):
        raise ConfigError("committedApp and committedHandler belong together: set both or none")
    return (app, handler) if app and handler else None


def _columns(options: OptionParser) -> Columns:
    packed = options.choice("layout", ("columns", "packed"), "columns") == "packed"
    for name in _COLUMNS_ONLY if packed else _PACKED_ONLY:
        if name in options.values:
            raise ConfigError(f"option {name} needs layout={'columns' if packed else 'packed'}")
    return Columns(
        fields_as=cast(FieldsAs, options.choice("fieldsAs", ("array", "map", "json"), "array")),
        failfast=options.choice("mode", ("permissive", "failfast"), "permissive") == "failfast",
        skip_redriven=options.choice("redriven", ("keep", "skip"), "keep") == "skip",
        packed=packed,
        key_field=options.text("keyField"),
        buckets=options.number("buckets") or 1,
    )
