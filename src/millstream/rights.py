"""What each kind of process does in Redis, as data: the commands and keys that its ACL user needs, and no more.

Redis checks every command that a script runs as if the user had sent it (Redis documentation, "ACL" and "Scripting with
Lua"), so what a script does is listed beside what is sent. Tests hold the lists against the scripts, and run every
role without each of its rights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from millstream.errors import ConfigError
from millstream.naming import MASTER, PREFIX, ServiceKeys, check_identifier, check_stream, hash_tag, is_pattern, to_wire

ANY = "*"
"""The pattern of all streams."""


class RoleName(StrEnum):
    """The kinds of processes."""

    WORKER = "worker"
    SPARK = "spark"
    SOURCE = "source"
    GROUP_SOURCE = "group-source"
    SINK = "sink"
    PRODUCER = "producer"
    LEASES = "leases"
    MASTER = "master"
    CONSUMER = "consumer"
    ROUTER = "router"
    OPERATOR = "operator"


_LINES = "exists hdel hexists hget hkeys llen lpush lrange lrem rpush time unlink xclaim zrange zrem"
_GROUP = "exists hexists hkeys hmget xclaim xgroup|create xgroup|delconsumer xinfo|consumers xinfo|groups"
_TAKEOVER = f"{_LINES} {_GROUP} del hset xpending xrevrange"
_COMPLETED = f"{_LINES} hincrby hlen hset lpop rename"
_MAY_COMMIT = "hdel hincrby hset xadd"
_SERVICE = (
    "hdel hget hincrby hset lpush sadd scard srandmember srem time xack xadd xclaim xdel xgroup|create "
    "xgroup|delconsumer xpending xrange zrem"
)

SCRIPTS: Mapping[str, str] = {
    "ack": "xack xpending",
    "adopt": f"{_LINES} hmget linsert lpos xpending",
    "advance": f"{_LINES} hmget hset",
    "aside": f"{_LINES} {_GROUP} hset lindex zadd",
    "aside_keys": _LINES,
    "aside_ready": f"{_LINES} {_GROUP} hlen zrangebyscore",
    "arrive": f"{_LINES} hset hsetnx",
    "balance": f"{_SERVICE} exists get hexists hgetall hlen hsetnx incrby llen lpop lrange pexpire smembers xgroup|setid "
    "xinfo|groups xinfo|stream xlen xreadgroup zadd zrange zrangebyscore zscore",
    "begin": f"{_TAKEOVER} {_MAY_COMMIT} ltrim xack zadd",
    "cancel": "hdel zrem",
    "checkpoint": f"{_GROUP} del hset time unlink xack xpending",
    "claim_stream": f"{_SERVICE} hexists lrem zscore",
    "commit": f"{_LINES} get hincrby hmget hset ltrim set type xack xadd xpending",
    "count": "xrange",
    "dismiss": "xclaim xgroup|delconsumer xinfo|consumers xpending",
    "due": "hdel hget time type xadd zrange zrangebyscore zrem",
    "expect": f"{_LINES} hincrby hset hsetnx",
    "extend": f"{_LINES} hmget hset zadd",
    "finish": f"{_COMPLETED} lindex xack xpending",
    "forget": f"{_LINES} {_GROUP}",
    "group_ack": "hget hset llen lrange ltrim xack xpending",
    "group_adopt": "hget hincrby hset xautoclaim",
    "group_batch": "hget hincrby hset llen rpush xclaim xpending",
    "group_keep": "hget hincrby hset xclaim xpending",
    "hand_in": f"{_SERVICE} hexists lrem",
    "line_names": _LINES,
    "lowest": f"{_LINES} hlen hset lindex zcard",
    "hold": "hget xclaim xpending",
    "join": f"{_TAKEOVER} {_MAY_COMMIT} xack xgroup|setid",
    "leave": f"{_LINES} hmget xrange",
    "name": "del get pexpire pttl set",
    "publish": "expire get hget hset hsetnx set time type xadd xlen zadd zcard",
    "range": "xrange",
    "rate": "hget hset time",
    "read": "xreadgroup",
    "recover": f"{_LINES} hgetall hincrby lindex xpending",
    "redrive": "type xadd xdel xrange",
    "release": f"{_LINES} hset lindex xpending zadd",
    "retire": _SERVICE,
    "route": f"{_LINES} {_GROUP} hset xgroup|setid",
    "seal": "hmget hset type xinfo|stream",
    "send_on": "get hget hset set xadd",
    "settle": f"{_COMPLETED} hmget lindex lpos xack xpending xrange",
    "settled": f"{_LINES} hmget lindex xpending xrange",
    "sink_ask": "hmget sadd",
    "sink_begin": "get hmget hset set time",
    "sink_decide": "hmget hset",
    "sink_drain": "exists hincrby hmget hset lindex lpop xadd xinfo|stream xtrim",
    "sink_seal": "expire hset llen persist type xadd xinfo|stream",
    "sink_stage": "expire llen rpush",
    "sink_turn": "hdel hmget hset",
    "sink_upsert": "getrange hdel hget hset set type",
    "steer": f"{_LINES} hincrby hmget hset hsetnx lindex lpop xack xadd xpending",
    "swap": "hdel hget hset",
    "take": f"{_LINES} hincrby hmget hset hvals lindex ltrim xpending zadd zrangebyscore",
    "tend": f"{_COMPLETED} {_GROUP} hgetall hsetnx lindex xpending zadd",
    "trim": "exists xinfo|groups xpending xtrim",
}
"""The commands that each script in `millstream.lua` runs."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """What one kind of process does.

    * `scripts`, `direct`: the scripts that it runs, and the commands that it sends itself
    * `unreached`: commands of these scripts that it never gets to
    * `helpful`: commands that it sends itself, and does without where it must, at a cost
    * `writes`: it writes outputs, or looks at them
    * `looks`: when it looks for streams
    * `touches`: it touches the streams themselves
    * `own_keys`: which of the keys that millstream keeps for a stream, with `{app}` for the app's name
    * `app_keys`: keys that belong to no stream
    * `serves`: it has to do with services
    """

    scripts: Sequence[str]
    direct: str
    unreached: str = ""
    helpful: str = ""
    writes: bool = True
    looks: Literal["never", "by pattern", "always"] = "by pattern"
    touches: bool = True
    own_keys: Sequence[str] = ()
    app_keys: Sequence[str] = ()
    serves: bool = False

    def commands(self, *, looking: bool) -> frozenset[str]:
        """Everything that it runs; `looking`: its streams are given by a pattern."""
        found = {*self.direct.split(), *self.helpful.split(), *(("eval", "evalsha") if self.scripts else ())}
        for script in self.scripts:
            found.update(SCRIPTS[script].split())
        if self.looks == "always" or (looking and self.looks == "by pattern"):
            found.add("scan")
        return frozenset(found - set(self.unreached.split()))


_HANDLERS = "{app}.*"
_DELAYED = ("due", "delayed")
_KEYED = ("range", "route", "take", "extend", "release", "recover", "lowest")
_GROW = ("seal", "swap")
_MOVE = ("expect", "leave", "arrive", "settled", "send_on")
_LAYOUT = ("partition", "partitions")

ROLES: Mapping[RoleName, Role] = {
    RoleName.WORKER: Role(
        scripts=(
            "join",
            "read",
            "commit",
            "hold",
            "checkpoint",
            *_KEYED,
            *_GROW,
            *_MOVE,
            "due",
            "name",
            "rate",
            "trim",
            "dismiss",
        ),
        direct="blpop exists hdel hget hmget hscan hset lpop ltrim rpush xack xclaim xlen xpending xrange xread xreadgroup",
        helpful="client|tracking info",
        unreached="hvals",
        own_keys=(_HANDLERS, *_DELAYED, *_LAYOUT),
        app_keys=(f"{PREFIX}:worker:{{app}}:*",),
    ),
    RoleName.SPARK: Role(
        scripts=("begin", "commit", "advance", "forget", "aside", "aside_keys", "aside_ready", "due", *_GROW, *_MOVE),
        direct="client|reply hdel hexists hget hincrby hmget hscan hset set time xgroup|create xgroup|destroy xgroup|setid xinfo|groups "
        "xinfo|stream xrange xreadgroup xrevrange",
        helpful="client|tracking",
        unreached="lpush",
        own_keys=(_HANDLERS, *_DELAYED, *_LAYOUT),
        app_keys=(f"{PREFIX}:worker:{{app}}:*",),
    ),
    RoleName.SOURCE: Role(
        scripts=(),
        direct="client|reply xgroup|create xgroup|destroy xgroup|setid xinfo|groups xinfo|stream xrange xreadgroup",
        helpful="client|tracking",
        writes=False,
    ),
    RoleName.GROUP_SOURCE: Role(
        scripts=("group_adopt", "group_batch", "group_keep", "group_ack"),
        direct="client|reply hget hincrby hmget llen lrange time unlink xgroup|create xinfo|groups xinfo|stream xpending xrange "
        "xreadgroup",
        writes=False,
        own_keys=("taken:*",),
    ),
    RoleName.SINK: Role(
        scripts=(
            "sink_begin",
            "sink_stage",
            "sink_ask",
            "sink_seal",
            "sink_decide",
            "sink_turn",
            "sink_drain",
            "sink_upsert",
        ),
        direct="hmget sadd smembers srem unlink",
        writes=False,
        looks="never",
        own_keys=("sink:*",),
        app_keys=(f"{PREFIX}:{{{{sink:*",),
    ),
    RoleName.PRODUCER: Role(
        scripts=("publish", "cancel", *_GROW),
        direct="get hget ping wait zcard zrange",
        writes=False,
        looks="never",
        own_keys=(*_DELAYED, *_LAYOUT, "producer:*", "once:*"),
    ),
    RoleName.LEASES: Role(
        scripts=("balance", "claim_stream", "hand_in", "retire"),
        direct="xadd xread",
        writes=False,
        looks="never",
        touches=False,
        serves=True,
    ),
    RoleName.MASTER: Role(
        scripts=(
            "join",
            "commit",
            "range",
            "route",
            "take",
            "release",
            "tend",
            "adopt",
            "finish",
            "settle",
            "steer",
            "swap",
            "line_names",
        ),
        direct="hget hgetall hlen hmget hscan hvals lindex llen lrange time xack xinfo|consumers xpending xrange xread "
        "zmscore zrange",
        helpful="info",
        unreached="get set",
        writes=False,
        looks="never",
        own_keys=(f"{MASTER}.*",),
    ),
    RoleName.CONSUMER: Role(scripts=("ack",), direct="xreadgroup", writes=False, looks="never"),
    RoleName.ROUTER: Role(
        scripts=(),
        direct="client|setname client|tracking ping xinfo|stream xrange xread",
        writes=False,
        looks="never",
    ),
    RoleName.OPERATOR: Role(
        scripts=("count", "dismiss", "redrive", "steer", "hand_in", *_GROW),
        direct="client|setname exists hdel hget hgetall hlen hmget hscan hset lindex llen lrange ping time "
        "xautoclaim xclaim xdel xgroup|create xgroup|delconsumer xgroup|destroy xgroup|setid xinfo|consumers "
        "xinfo|groups xinfo|stream xlen xpending xrange xread xrevrange zrange",
        helpful="client|tracking",
        unreached="hkeys sadd scard srandmember unlink",
        looks="always",
        own_keys=("*",),
        app_keys=(f"{PREFIX}:worker:{{app}}:*",),
        serves=True,
    ),
}

_CLUSTER = ("asking", "cluster|slots", "command")
_READ_REPLICAS = (RoleName.SPARK, RoleName.SOURCE, RoleName.GROUP_SOURCE)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The rights of one user: subcommands stand as `xgroup|create`, keys are glob patterns."""

    user: str
    roles: tuple[RoleName, ...]
    commands: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def line(self) -> str:
        """The Redis command that gives these rights and no others, whatever the user had, and keeps the passwords."""
        rights = " ".join(f"+{command}" for command in self.commands)
        keys = " ".join(f"~{key}" for key in self.keys)
        return f"ACL SETUSER {self.user} on clearselectors resetkeys resetchannels -@all {rights} {keys}"


def rule(
    user: str,
    roles: Sequence[RoleName],
    *,
    streams: Sequence[str] = (ANY,),
    outputs: Sequence[str] = (),
    app: str | None = None,
    services: Sequence[str] = (),
    cluster: bool = False,
    replicas: bool = False,
) -> Rule:
    """The rights that `user` needs to be all of `roles`.

    * `streams`: names or glob patterns of the streams that are read, or published to
    * `outputs`: those that handlers write to
    * `app`: whose handlers; None for all apps
    * `services`: those that streams are announced to, ANY for all; the handlers' own come with `app`, or where a consumer of
      services has no others
    * `cluster`: with what a client of Redis Cluster asks
    * `replicas`: with what a Spark program asks that reads from replicas

    Raises ConfigError for names that cannot be used.
    """
    check_identifier("user name", user)
    named = check_identifier("app name", app) if app else ANY
    looking = any(map(is_pattern, streams))
    commands = set(_CLUSTER if cluster else ())
    if replicas and not {*roles}.isdisjoint(_READ_REPLICAS):
        commands |= {"info", "readonly"} if cluster else {"info"}
    touched = streams if any(ROLES[role].touches for role in roles) else ()
    keys = dict.fromkeys(map(_literal, touched))
    if any(ROLES[role].serves for role in roles):
        serving = ANY if RoleName.LEASES in roles and not services else None
        keys |= dict.fromkeys(_service_keys(services, app or serving))
    for role in map(ROLES.__getitem__, roles):
        commands |= role.commands(looking=looking)
        keys |= dict.fromkeys(map(_literal, outputs if role.writes else ()))
        keys |= dict.fromkeys(
            f"{_base(stream)}:{kind.format(app=named)}" for stream in streams for kind in role.own_keys
        )
        keys |= dict.fromkeys(kind.format(app=named) for kind in role.app_keys)
    return Rule(
        user=user, roles=tuple(roles), commands=tuple(sorted(commands)), keys=(ANY,) if ANY in keys else tuple(keys)
    )


def _service_keys(services: Sequence[str], app: str | None) -> Iterator[str]:
    """The keys of these services, and those of the app's handlers."""
    inputs = [ServiceKeys(service).input for service in services if service != ANY]
    if app:
        inputs.append(f"{PREFIX}:{app}.*-input")
    for one in inputs:
        yield from (one, f"{_base(one)}:*")
    if ANY in services:
        yield ANY


def _base(stream: str) -> str:
    """What millstream's keys of these streams begin with, as `naming` makes it. A pattern may stand for any tag."""
    tag = ANY if is_pattern(stream) else _literal(hash_tag(check_stream(stream)))
    return f"{PREFIX}:{{{tag}}}:{_literal(stream)}"


def _literal(stream: str) -> str:
    """A name as an ACL pattern: what cannot stand in a rule, such as a space, is any one byte."""
    if not stream:
        raise ConfigError("a stream's name is empty: leave it out, or write '*' for all streams")
    return "".join(chr(byte) if 0x20 < byte < 0x7F and byte not in b"\"'" else "?" for byte in to_wire(stream))
