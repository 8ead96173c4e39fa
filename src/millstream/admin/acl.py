"""ACL roles: the commands and keys that each kind of process needs in Redis, and no more.

Redis checks every command in a script as if the user had sent it (Redis documentation, "ACL" and "Scripting with
Lua"), so the commands of scripts are listed as well as direct ones. Tests compare the lists with the scripts, and run
every role without each of its rights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from millstream.errors import ConfigError
from millstream.redis_client.key_names import (
    MASTER,
    PREFIX,
    ServiceKeys,
    audit_key,
    check_identifier,
    check_stream,
    ended_sessions_key,
    hash_tag,
    history_key,
    history_writer_key,
    is_pattern,
    to_wire,
)

ANY = "*"
"""The pattern of all streams."""


class RoleName(StrEnum):
    """The kinds of processes."""

    WORKER = "worker"
    SPARK = "spark"
    SOURCE = "source"
    GROUP_SOURCE = "group-source"
    STATE_SOURCE = "state-source"
    SINK = "sink"
    PRODUCER = "producer"
    LEASES = "leases"
    MASTER = "master"
    CONSUMER = "consumer"
    ROUTER = "router"
    EXPORTER = "exporter"
    OPERATOR = "operator"
    CONSOLE = "console"


_QUEUES = "exists hdel hexists hget hkeys llen lpush lrange lrem rpush time unlink xclaim zrange zrem"
_GROUP = "exists hexists hkeys hmget xclaim xgroup|create xgroup|delconsumer xinfo|consumers xinfo|groups"
_TAKEOVER = f"{_QUEUES} {_GROUP} del hset xpending xrevrange"
_COMPLETED = f"{_QUEUES} hincrby hlen hset lpop rename xdel xrange"
_MAY_COMMIT = "hdel hincrby hset xadd xdel"
_MAY_EXPIRE = "hpexpire hpexpireat hpexpiretime"
_EXPIRY = frozenset(_MAY_EXPIRE.split())
"""Commands for states that expire. Redis 7.0 and Valkey 8 do not know them, and refuse a rule that names one."""
_SERVICE = (
    "hdel hget hincrby hset lpush sadd scard srandmember srem time xack xadd xclaim xdel xgroup|create "
    "xgroup|delconsumer xpending xrange zrem"
)

SCRIPTS: Mapping[str, str] = {
    "groups/ack_owned": "xack xpending",
    "keys/requeue_pending": f"{_QUEUES} hmget lindex linsert lpos xpending",
    "commit/advance_committed": f"{_QUEUES} hmget hset",
    "keys/defer": f"{_QUEUES} {_GROUP} hlen hset hsetnx lindex zadd",
    "keys/deferred_keys": _QUEUES,
    "keys/runnable_keys": f"{_QUEUES} {_GROUP} hlen zrangebyscore",
    "partitions/import_keys": f"{_QUEUES} hpexpire hpexpireat hset hsetnx",
    "leases/heartbeat": f"{_SERVICE} exists get hexists hgetall hlen hsetnx incrby llen lpop lrange pexpire smembers xgroup|setid "
    "xinfo|groups xinfo|stream xlen xreadgroup zadd zrange zrangebyscore zscore",
    "commit/begin_run": f"{_TAKEOVER} {_MAY_COMMIT} {_MAY_EXPIRE} hrandfield ltrim xack xgroup|setid zadd",
    "producer/cancel_delayed": "hdel zrem",
    "commit/checkpoint": f"{_GROUP} del hset time unlink xack xpending",
    "leases/claim_stream": f"{_SERVICE} hexists lrem zscore",
    "commit/commit": f"{_QUEUES} get hincrby hmget hpexpire hrandfield hset lindex ltrim set type xack xadd xdel "
    "xinfo|groups xinfo|stream xpending xrange zadd",
    "groups/count_entries": "xrange",
    "commit/count_dead_letters": "xrevrange",
    "groups/delete_consumer": "xclaim xgroup|delconsumer xinfo|consumers xpending",
    "producer/move_due": "hdel hget time type xadd zrange zrangebyscore zrem",
    "partitions/await_keys": f"{_QUEUES} hincrby hset hsetnx",
    "keys/extend_leases": f"{_QUEUES} hmget hset zadd",
    "master/finish": f"{_COMPLETED} lindex xack xpending",
    "commit/forget_progress": f"{_QUEUES} {_GROUP}",
    "groups/ack_batch": "hget hset llen lrange ltrim xack xpending",
    "groups/claim_idle_batch": "hget hincrby hset xautoclaim",
    "groups/fill_batch": "hget hincrby hset llen rpush xclaim xpending",
    "groups/renew_batch": "hget hincrby hset xclaim xpending",
    "leases/end_leases": f"{_SERVICE} hexists lrem",
    "keys/queued_keys": _QUEUES,
    "keys/lowest_queued_id": f"{_QUEUES} hlen hset lindex zcard",
    "commit/set_idle_time": "hget xclaim xpending",
    "commit/join_workers": f"{_TAKEOVER} {_MAY_COMMIT} {_MAY_EXPIRE} hrandfield xack xgroup|setid",
    "partitions/export_keys": f"{_QUEUES} hmget hpexpire hpexpiretime xrange",
    "shared/hold_members": "pexpire time zadd zrem zremrangebyscore",
    "shared/hold_name": "del get pexpire pttl set",
    "producer/fire": "hget hset time type xadd",
    "producer/read_schedule": "hget time",
    "producer/publish": "expire get hget hset hsetnx set time type xadd xlen zadd zcard",
    "commit/read_range": "xrange",
    "commit/reserve_rate": "hmget hset time",
    "commit/read_entries": "xreadgroup",
    "keys/recover_leases": f"{_QUEUES} hgetall hincrby hmget hsetnx lindex xpending zadd",
    "producer/redrive": "hdel hget hset type xadd xdel xrange",
    "keys/release_leases": f"{_QUEUES} hlen hset hsetnx lindex linsert xpending zadd",
    "leases/leave_service": _SERVICE,
    "keys/take_permit": f"{_QUEUES} hgetall hlen hmget hset pexpire pttl set zadd zcard zcount zremrangebyscore zscore",
    "keys/return_permit": f"{_QUEUES} hgetall hlen set zadd zcount zrangebyscore zscore",
    "keys/route": f"{_QUEUES} {_GROUP} hset xgroup|setid",
    "keys/route_by_field": f"{_QUEUES} {_GROUP} hset xack xgroup|setid xreadgroup",
    "partitions/close": "hmget hset type xinfo|stream",
    "partitions/forward_entry": "get hdel hget hset set xadd xdel",
    "master/end_lease": f"{_COMPLETED} hmget lindex lpos xack xpending",
    "partitions/is_drained": f"{_QUEUES} hmget lindex xpending xrange",
    "sink/read_decision": "hmget sadd",
    "sink/begin": "get hmget hset set time",
    "sink/decide": "hmget hset",
    "sink/drain": "exists hincrby hmget hset lindex lpop xadd xinfo|stream xtrim",
    "sink/close": "expire hset llen persist type xadd xinfo|stream",
    "sink/stage": "expire llen rpush",
    "sink/end_batch": "hdel hmget hset",
    "sink/upsert": "getrange hdel hget hset set type",
    "keys/park_unpark_skip": f"{_QUEUES} hincrby hmget hset hsetnx lindex lpop xack xadd xdel xpending xrange",
    "shared/compare_and_set": "hdel hget hset",
    "keys/lease_keys": f"{_QUEUES} hincrby hmget hset hsetnx hvals lindex ltrim xpending zadd zrangebyscore",
    "master/renew_leases": f"{_COMPLETED} {_GROUP} hgetall hsetnx lindex xpending zadd",
    "commit/trim": "exists xinfo|groups xpending xtrim",
}
"""The commands that each script in `millstream.redis_client.lua` runs."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """The rights of one kind of process.

    * `scripts`, `direct`: the scripts that it runs, and the commands that it sends directly
    * `never_executed`: commands of these scripts that it never executes
    * `optional`: direct commands that it can do without, at a cost
    * `outputs`: what it does with output streams; one that writes may read them, too
    * `scans`: when it scans for streams
    * `reads_streams`: it accesses the streams themselves
    * `stream_keys`: the suffixes of millstream's keys of a stream, with `{app}` for the app's name
    * `app_keys`: keys that belong to no stream
    * `uses_services`: it uses services
    """

    scripts: Sequence[str]
    direct: str
    never_executed: str = ""
    optional: str = ""
    outputs: Literal["none", "reads", "writes"] = "none"
    scans: Literal["never", "by pattern", "always"] = "by pattern"
    reads_streams: bool = True
    stream_keys: Sequence[str] = ()
    app_keys: Sequence[str] = ()
    uses_services: bool = False

    def commands(self, *, by_pattern: bool, state_ttl: bool = False) -> frozenset[str]:
        """All its commands; `by_pattern`: its streams are given by a pattern; `state_ttl`: states expire."""
        found = {*self.direct.split(), *self.optional.split(), *(("eval", "evalsha") if self.scripts else ())}
        for script in self.scripts:
            found.update(SCRIPTS[script].split())
        if self.scans == "always" or (by_pattern and self.scans == "by pattern"):
            found.add("scan")
        return frozenset(found - set(self.never_executed.split()) - (set() if state_ttl else _EXPIRY))


_HANDLERS = "{app}.*"
_DELAYED = ("due", "delayed")
_KEYED = (
    "commit/read_range",
    "keys/route",
    "keys/route_by_field",
    "keys/lease_keys",
    "keys/extend_leases",
    "keys/release_leases",
    "keys/recover_leases",
    "keys/lowest_queued_id",
)
_LIMIT = ("keys/take_permit", "keys/return_permit")
_FIGURES = ("groups/count_entries", "commit/count_dead_letters")
_GROW = ("partitions/close", "shared/compare_and_set")
_MIGRATE = (
    "partitions/await_keys",
    "partitions/export_keys",
    "partitions/import_keys",
    "partitions/is_drained",
    "partitions/forward_entry",
)
_PARTITION_MAP = ("partition", "partitions")

ROLES: Mapping[RoleName, Role] = {
    RoleName.WORKER: Role(
        scripts=(
            "commit/join_workers",
            "commit/read_entries",
            "commit/commit",
            "commit/set_idle_time",
            "commit/checkpoint",
            *_KEYED,
            *_GROW,
            *_MIGRATE,
            "producer/move_due",
            "producer/read_schedule",
            "producer/fire",
            "shared/hold_members",
            "shared/hold_name",
            "commit/reserve_rate",
            *_LIMIT,
            "commit/trim",
            "groups/delete_consumer",
            *_FIGURES,
        ),
        direct="blpop exists hdel hget hmget hscan hset lpop ltrim rpush xack xclaim xdel xlen xpending xrange xread "
        "xreadgroup",
        optional="client|tracking info",
        never_executed="hvals",
        outputs="writes",
        stream_keys=(_HANDLERS, *_DELAYED, "schedules", *_PARTITION_MAP),
        app_keys=(f"{PREFIX}:worker:{{app}}:*",),
    ),
    RoleName.SPARK: Role(
        scripts=(
            "commit/begin_run",
            "commit/commit",
            "commit/reserve_rate",
            *_LIMIT,
            "commit/advance_committed",
            "commit/forget_progress",
            "keys/defer",
            "keys/deferred_keys",
            "keys/runnable_keys",
            "producer/move_due",
            "producer/read_schedule",
            "producer/fire",
            *_GROW,
            *_MIGRATE,
            "shared/hold_members",
            "shared/hold_name",
            *_FIGURES,
        ),
        direct="client|reply del get hdel hexists hget hmget hscan hset set time xdel xgroup|create xgroup|destroy xgroup|setid xinfo|groups "
        "xinfo|stream xlen xpending xrange xreadgroup xrevrange zcard",
        optional="client|tracking info",
        never_executed="lpush",
        outputs="writes",
        stream_keys=(_HANDLERS, *_DELAYED, "schedules", *_PARTITION_MAP),
        app_keys=(f"{PREFIX}:worker:{{app}}:*",),
    ),
    RoleName.SOURCE: Role(
        scripts=(),
        direct="client|reply xgroup|create xgroup|destroy xgroup|setid xinfo|groups xinfo|stream xrange xreadgroup",
        optional="client|tracking",
    ),
    RoleName.GROUP_SOURCE: Role(
        scripts=("groups/claim_idle_batch", "groups/fill_batch", "groups/renew_batch", "groups/ack_batch"),
        direct="client|reply hget hincrby hmget llen lrange time unlink xgroup|create xinfo|groups xinfo|stream xpending xrange "
        "xreadgroup",
        stream_keys=("batch:*",),
    ),
    RoleName.STATE_SOURCE: Role(
        scripts=(),
        direct="hget hlen hscan time",
        reads_streams=False,
        stream_keys=("{app}.*:state", "{app}.*:meta"),
    ),
    RoleName.SINK: Role(
        scripts=(
            "sink/begin",
            "sink/stage",
            "sink/read_decision",
            "sink/close",
            "sink/decide",
            "sink/end_batch",
            "sink/drain",
            "sink/upsert",
        ),
        direct="hmget sadd smembers srem unlink",
        scans="never",
        stream_keys=("sink:*",),
        app_keys=(f"{PREFIX}:{{{{sink:*",),
    ),
    RoleName.PRODUCER: Role(
        scripts=("producer/publish", "producer/cancel_delayed", *_GROW),
        direct="get hget ping wait zcard zrange",
        scans="never",
        stream_keys=(*_DELAYED, *_PARTITION_MAP, "producer:*", "dedupe:*"),
    ),
    RoleName.LEASES: Role(
        scripts=("leases/heartbeat", "leases/claim_stream", "leases/end_leases", "leases/leave_service"),
        direct="xadd xread",
        scans="never",
        reads_streams=False,
        uses_services=True,
    ),
    RoleName.MASTER: Role(
        scripts=(
            "commit/join_workers",
            "commit/commit",
            "commit/read_range",
            "keys/route",
            "keys/lease_keys",
            "keys/release_leases",
            "master/renew_leases",
            "keys/requeue_pending",
            "master/finish",
            "master/end_lease",
            "keys/park_unpark_skip",
            "shared/compare_and_set",
            "keys/queued_keys",
        ),
        direct="hget hgetall hlen hmget hscan hvals lindex llen lrange time xack xinfo|consumers xpending xrange xread "
        "zmscore zrange",
        optional="info",
        never_executed="get set hpexpire hpexpireat hpexpiretime hrandfield xinfo|stream",
        scans="never",
        stream_keys=(f"{MASTER}.*",),
    ),
    RoleName.CONSUMER: Role(scripts=("groups/ack_owned",), direct="xreadgroup", scans="never"),
    RoleName.ROUTER: Role(
        scripts=(),
        direct="client|setname client|tracking ping xinfo|stream xrange xread",
        scans="never",
    ),
    RoleName.EXPORTER: Role(
        scripts=_FIGURES,
        direct="hlen hmget hscan lindex llen lrange time xinfo|groups xinfo|stream xlen xpending xrange zcard zrange",
        scans="always",
        stream_keys=(_HANDLERS, "due"),
    ),
    RoleName.OPERATOR: Role(
        scripts=(
            "commit/read_range",
            "groups/count_entries",
            "groups/delete_consumer",
            "producer/redrive",
            "producer/cancel_delayed",
            "keys/park_unpark_skip",
            "leases/end_leases",
            *_GROW,
        ),
        direct="client|setname exists get hdel hget hgetall hkeys hlen hmget hpexpiretime hscan hset lindex llen lrange "
        "ping set time unlink xadd xautoclaim xclaim xdel xgroup|create xgroup|delconsumer xgroup|destroy xgroup|setid xinfo|consumers "
        "xinfo|groups xinfo|stream xlen xpending xrange xread xrevrange zcard zmscore zrange",
        optional="client|tracking",
        never_executed="sadd scard srandmember",
        scans="always",
        outputs="writes",
        stream_keys=("*",),
        app_keys=(f"{PREFIX}:worker:{{app}}:*", audit_key(), history_key()),
        uses_services=True,
    ),
    RoleName.CONSOLE: Role(
        scripts=(
            *_FIGURES,
            "producer/redrive",
            "producer/cancel_delayed",
            "keys/park_unpark_skip",
            "shared/hold_members",
            "shared/hold_name",
        ),
        direct="exists get hdel hget hgetall hlen hmget hscan hset info lindex llen lrange ping set time xadd xdel "
        "xgroup|setid xinfo|consumers xinfo|groups xinfo|stream xlen xpending xrange xrevrange zadd zcard zmscore zrange "
        "zremrangebyrank zremrangebyscore",
        optional="client|tracking",
        never_executed="hkeys unlink",
        scans="always",
        outputs="reads",
        stream_keys=("*",),
        app_keys=(
            f"{PREFIX}:worker:{{app}}:*",
            audit_key(),
            ended_sessions_key(),
            history_key(),
            history_writer_key(),
        ),
        uses_services=True,
    ),
}

_CLUSTER = ("asking", "cluster|slots", "command")
_READ_REPLICAS = (RoleName.SPARK, RoleName.SOURCE, RoleName.GROUP_SOURCE)


@dataclass(frozen=True, kw_only=True)
class AclRule:
    """The rights of one user: subcommands are written as `xgroup|create`, keys are glob patterns.

    `read_keys`: further keys, which it may only read.
    """

    user: str
    roles: tuple[RoleName, ...]
    commands: tuple[str, ...]
    keys: tuple[str, ...]
    read_keys: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The Redis command that sets exactly these rights, replaces all earlier ones, and keeps the passwords."""
        rights = " ".join(f"+{command}" for command in self.commands)
        keys = " ".join((*(f"~{key}" for key in self.keys), *(f"%R~{key}" for key in self.read_keys)))
        return f"ACL SETUSER {self.user} on clearselectors resetkeys resetchannels -@all {rights} {keys}"


def acl_rule(
    user: str,
    roles: Sequence[RoleName],
    *,
    streams: Sequence[str] = (ANY,),
    outputs: Sequence[str] = (),
    app: str | None = None,
    services: Sequence[str] = (),
    cluster: bool = False,
    replicas: bool = False,
    state_ttl: bool = False,
) -> AclRule:
    """The rights that `user` needs for all of `roles`.

    * `streams`: names or glob patterns of the streams to read or publish to
    * `outputs`: streams that handlers write to
    * `app`: the app of the handlers; None for all apps
    * `services`: services to which streams are announced, ANY for all. Those of handlers are included if `app` is
      given, or for the role `leases` if no services are
    * `cluster`: include the commands of a client of Redis Cluster
    * `replicas`: include the commands of a Spark program that reads from replicas
    * `state_ttl`: include the commands for handlers with `state_ttl_ms`, which Redis 7.4, Valkey 9 and newer know

    Raises ConfigError for invalid names.
    """
    check_identifier("user name", user)
    named = check_identifier("app name", app) if app else ANY
    by_pattern = any(map(is_pattern, streams))
    commands = set(_CLUSTER if cluster else ())
    if replicas and not {*roles}.isdisjoint(_READ_REPLICAS):
        commands |= {"info", "readonly"} if cluster else {"info"}
    touched = streams if any(ROLES[role].reads_streams for role in roles) else ()
    keys = dict.fromkeys(map(_literal, touched))
    read_keys: dict[str, None] = {}
    if any(ROLES[role].uses_services for role in roles):
        serving = ANY if RoleName.LEASES in roles and not services else None
        keys |= dict.fromkeys(_service_keys(services, app or serving))
    for role in map(ROLES.__getitem__, roles):
        commands |= role.commands(by_pattern=by_pattern, state_ttl=state_ttl)
        keys |= dict.fromkeys(map(_literal, outputs if role.outputs == "writes" else ()))
        read_keys |= dict.fromkeys(map(_literal, outputs if role.outputs == "reads" else ()))
        keys |= dict.fromkeys(
            f"{_base(stream)}:{kind.format(app=named)}" for stream in streams for kind in role.stream_keys
        )
        keys |= dict.fromkeys(kind.format(app=named) for kind in role.app_keys)
    return AclRule(
        user=user,
        roles=tuple(roles),
        commands=tuple(sorted(commands)),
        keys=(ANY,) if ANY in keys else tuple(keys),
        read_keys=() if ANY in keys else tuple(one for one in read_keys if one not in keys),
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
    """The prefix of millstream's keys of these streams, as in `key_names`. A pattern matches any hash tag."""
    tag = ANY if is_pattern(stream) else _literal(hash_tag(check_stream(stream)))
    return f"{PREFIX}:{{{tag}}}:{_literal(stream)}"


def _literal(stream: str) -> str:
    """A name as an ACL pattern: a byte not allowed in a rule, such as a space, becomes `?`, which matches any byte."""
    if not stream:
        raise ConfigError("a stream's name is empty: omit it, or write '*' for all streams")
    return "".join(chr(byte) if 0x20 < byte < 0x7F and byte not in b"\"'" else "?" for byte in to_wire(stream))
