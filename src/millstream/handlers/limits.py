"""A handler's limit: its check at declaration, and what a message takes of it."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from millstream.errors import ConfigError, DecodeError, did_you_mean
from millstream.handlers.decoding import wire_types
from millstream.model import Limit, value_of
from millstream.redis_client.key_names import to_wire

_SHOWN = 40


class Share(NamedTuple):
    """What a message takes of its handler's limit: which value of the field, and how long of the rate, in milliseconds."""

    value: bytes
    takes_ms: float | None


def with_limit(where: str, options: Mapping[str, Any], *, in_batches: bool, model: type | None) -> Mapping[str, Any]:
    """Return the options with the limit that concerns single messages, and the rate of all messages as `rate`.

    Raises ConfigError if the handler cannot have the limit.
    """
    limit = options.get("limit")
    if limit is None:
        return options
    if not isinstance(limit, Limit):
        raise ConfigError(f'{where}: limit must be a Limit, like limit=Limit(per="tenant", at_once=4)')
    if limit.rate is not None and options.get("rate") is not None:
        raise ConfigError(f"{where}: rate and the rate of its limit exclude one another; drop one of the two")
    if limit.is_of_messages:
        _check(where, limit, options, in_batches=in_batches, model=model)
    if limit.per is None and limit.cost is None and limit.rate is not None:
        rate = limit.amount * 1_000 / limit.period_ms
        rest = None if limit.at_once is None else replace(limit, rate=None)
        return {**options, "limit": rest, "rate": rate}
    return options


def _check(where: str, limit: Limit, options: Mapping[str, Any], *, in_batches: bool, model: type | None) -> None:
    what = "a Limit with per, at_once or cost"
    if options.get("order") == "stream":
        raise ConfigError(
            f'{where}: with order="stream" a message that waits for {what} would hold up its whole stream; give it '
            'key="field" instead'
        )
    if options.get("key") is None:
        raise ConfigError(f'{where}: {what} makes messages wait in the queues of their keys; give it key="field"')
    if in_batches:
        raise ConfigError(f"{where}: {what} is for handlers of one message at a time; take one message, not a list")
    if options.get("partitions") is not None:
        raise ConfigError(
            f"{where}: {what} is counted by stream, and a value would have the limit on each of the partitions; drop "
            "partitions, or the limit"
        )
    for name in (limit.per, limit.cost):
        if name is not None and model is not None and name not in wire_types(model):
            names = list(wire_types(model))
            hint = did_you_mean(name, names, f"it has {', '.join(names)}")
            raise ConfigError(f"{where}: Limit: {name!r} is not a field of {model.__name__}; {hint}")


@functools.lru_cache(maxsize=256)
def _wire_name(name: str) -> bytes:
    return to_wire(name)


def limited_value(limit: Limit | None, pairs: Sequence[bytes]) -> bytes | None:
    """Return the value of a message that the limit counts by; None if there is no such field, or no limit of values."""
    return None if limit is None or limit.per is None else value_of(pairs, _wire_name(limit.per))


def share_of(limit: Limit, pairs: Sequence[bytes]) -> Share:
    """Return what a message with these names and values takes of the limit. Raises DecodeError if its cost is no cost."""
    value = limited_value(limit, pairs) or b""
    if limit.rate is None:
        return Share(value, None)
    cost = 1.0 if limit.cost is None else _cost_of(limit.cost, limit.amount, pairs)
    return Share(value, cost * limit.period_ms / limit.amount)


def _cost_of(name: str, most: float, pairs: Sequence[bytes]) -> float:
    found = value_of(pairs, _wire_name(name))
    if found is None:
        raise DecodeError(f"the message has no field {name!r}, the cost that the limit counts")
    try:
        cost = math.nan if b"_" in found else float(found)  # Python's 1_000 is no number to others
    except ValueError:
        cost = math.nan
    if not 0 <= cost <= most:
        raise DecodeError(
            f"field {name!r} is {found[:_SHOWN].decode(errors='replace')!r}: the limit needs a cost from 0 to {most:g}, "
            "all that its rate allows in a period"
        )
    return cost
