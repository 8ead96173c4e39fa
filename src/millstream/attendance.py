"""How many workers of a handler are alive on a stream. A consumer group remembers everybody who ever took an entry."""

from collections.abc import Mapping, Sequence

from millstream.balancer.service import service_of
from millstream.client import Client, Command, Reply, raise_if_error
from millstream.errors import AccessDenied, ConfigError, RedisError
from millstream.lines import WAITING
from millstream.naming import PREFIX, HandlerKeys, ServiceKeys, from_wire, to_wire

_HEARD_MS = 60_000.0


def count_workers(
    client: Client, found: Sequence[HandlerKeys], *, heard_ms: float = _HEARD_MS
) -> Mapping[HandlerKeys, int]:
    """The workers that are alive, of each handler on a stream.

    Where workers lease whole streams that is the owner. Else it is a consumer of the group that was heard of within
    `heard_ms`, or whose name a supervisor holds. Raises RedisError but for AccessDenied.
    """
    owners = {label: _owners(client, label) for label in {_label(keys) for keys in found}}
    groups = client.pipeline([("XINFO", "CONSUMERS", to_wire(keys.stream), keys.group) for keys in found])
    consumers = {keys: _consumers(reply) for keys, reply in zip(found, groups, strict=True)}
    silent = {
        (keys.app, name) for keys, some in consumers.items() for name, idle_ms in some.items() if idle_ms >= heard_ms
    }
    named = sorted(silent)
    held = client.pipeline([("EXISTS", f"{PREFIX}:worker:{app}:{name}") for app, name in named])
    gone = {one for one, is_held in zip(named, held, strict=True) if is_held != 1}
    counts = {}
    for keys in found:
        leased = owners[_label(keys)]
        counts[keys] = (
            sum((keys.app, name) not in gone for name in consumers[keys])
            if leased is None
            else int(keys.stream in leased)
        )
    return counts


def _label(keys: HandlerKeys) -> str:
    return f"{keys.app}.{keys.handler}"


def _owners(client: Client, label: str) -> set[str] | None:
    """The streams that a living worker of the handler has; None if its workers, as far as is known, lease none."""
    try:
        service = service_of(client, label)
        if service is None:
            return None
        keys = ServiceKeys(service)
        asked: list[Command] = [("TIME",), ("ZRANGE", keys.alive, 0, -1, "WITHSCORES"), ("HGETALL", keys.owners)]
        (seconds, _), alive, owners = [raise_if_error(reply) for reply in client.pipeline(asked)]
    except (AccessDenied, ConfigError):
        return None
    now_s = float(seconds)
    living = {name for name, until in zip(alive[::2], alive[1::2], strict=True) if float(until) / 1000 > now_s}
    if not living:
        return None
    pairs = zip(owners[::2], owners[1::2], strict=True)
    return {from_wire(stream) for stream, owner in pairs if owner.partition(b" ")[2] in living}


def _consumers(reply: Reply) -> dict[str, int]:
    """Name and idle milliseconds of each consumer but the one that stands for nobody."""
    if isinstance(reply, RedisError):
        return {}  # the group is gone, or is not to be seen
    found = [dict(zip(one[::2], one[1::2], strict=True)) for one in reply]
    return {from_wire(one[b"name"]): one[b"idle"] for one in found if from_wire(one[b"name"]) != WAITING}
