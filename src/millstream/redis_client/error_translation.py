"""What redis-py raises and Redis refuses, in our own words and our own tree of errors: the one place that knows theirs.

Redis 7.0, 7.2 and later, and Valkey say the same in different words; all of them are known here.
"""

import re
from collections.abc import Sequence
from typing import Protocol

import redis
from redis.exceptions import RedisClusterException

from millstream.errors import (
    AccessDenied,
    CommandFailed,
    ConfigError,
    GroupMissing,
    OutOfMemory,
    RedisError,
    ScriptMissing,
    Unavailable,
    WrongType,
)
from millstream.redis_client.escaping import visible
from millstream.redis_client.key_names import to_wire
from millstream.redis_client.redaction import redact, redacted
from millstream.redis_client.resp import Arg, Command, routing_key
from millstream.redis_client.urls import explain_refusal

REDIS_ERRORS = (redis.exceptions.RedisError, RedisClusterException, OSError)

_AWAY = ("BUSY ", "MISCONF", "NOREPLICAS", "UNKILLABLE", "UNBLOCKED")
_DENIED_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")
"""How Redis 7.0, and how later ones and Valkey, say that a script has done what its user may not do."""

_PLACE_IN_SCRIPT = re.compile(r"script: (?:([0-9a-f]{40}), )?on @user_script:(\d+)\.?")  # Valkey 9 leaves out the hash
_CODE = re.compile("[A-Z]{2,}")
_COMMAND_IN_LUA = re.compile(r"\('([A-Z]+)'(?:, '([A-Z]+)')?")
_TYPES = {"X": "stream", "H": "hash", "Z": "zset", "B": "list", "L": "list", "R": "list", "S": "set"}
"""What a command needs, by the first letter of its name."""

_SCRIPTS, _READS, _WITH_SUBCOMMAND = ("EVAL", "EVALSHA"), ("XREAD", "XREADGROUP"), ("XINFO", "XGROUP")
_MOST_KEYS = 4
_HINT = "; `millstream acl` prints the rights that are needed"


class Named(Protocol):
    """A script, as far as messages name it."""

    name: str

    @property
    def text(self) -> str:
        """All of it."""
        ...


known_scripts: dict[Arg, Named] = {}
"""The scripts that were ever called, by their hashes and by their texts."""


def keys_of(command: Command) -> Sequence[Arg]:
    """The keys that a command names."""
    if command[0] in _SCRIPTS:
        return command[3 : 3 + int(command[2])]
    if command[0] in _READS:
        streams = list(command[[str(part).upper() for part in command].index("STREAMS") + 1 :])
        return streams[: len(streams) // 2]
    key = routing_key(command)
    return () if key is None else (key,)


def name_of(command: Command | None) -> str:
    """The command and what it is about, for messages; of a script its name, as its hash tells people nothing."""
    if not command:
        return "the command"
    if command[0] in _SCRIPTS:
        return f"the script {script.name}.lua" if (script := _script_of(command)) else "an unnamed script"
    if command[0] in _READS:
        return f"{command[0]} on {_listed(keys_of(command))}"
    words = command[: 3 if command[0] in _WITH_SUBCOMMAND else 2]
    return " ".join(_shown(part) for part in words)[:120]


def type_needed(text: str, command: Command) -> str:
    """The type that a key must have for what WRONGTYPE was said of: for `command`, or for that on a line of its script."""
    place = _PLACE_IN_SCRIPT.search(text)
    verb = _command_at(place, command) if place else str(command[0])
    return _TYPES.get(verb[:1].upper(), "string")


def wrong_type(command: Command, key: Arg, found: str, needed: str) -> WrongType:
    """What to raise once it is known which key is meant."""
    return WrongType(f"{name_of(command)}: {_shown(key)} holds a {found} where a {needed} is needed")


def denied_keys(error: RedisError, keys: Sequence[Arg]) -> AccessDenied:
    """The same refusal, with the names of the keys that it is about, or among which those are."""
    return AccessDenied(f"{str(error).removesuffix(_HINT)}: {_listed(keys)}{_HINT}")


def translate(error: Exception, url: str, command: Command | None = None) -> RedisError:
    """Turn what redis-py raised into our own tree. Raises ConfigError for a wrong URL."""
    text = _PLACE_IN_SCRIPT.sub(lambda found: _place(found, command), str(error))
    where = redact(url)
    if isinstance(error, RedisClusterException) and isinstance(
        why := error.__cause__ or error.__context__, REDIS_ERRORS
    ):
        return translate(why, url, command)  # why the last node could not be asked, or would not answer
    if command is None and (wrong := explain_refusal(text, where)):
        raise ConfigError(wrong) from error
    if isinstance(error, redis.exceptions.NoScriptError):
        return ScriptMissing(f"{name_of(command)} is not on the server")
    denied = (redis.exceptions.NoPermissionError, redis.exceptions.AuthorizationError)
    if isinstance(error, denied) or any(words in text for words in _DENIED_IN_SCRIPT):
        return AccessDenied(f"the Redis user may not do {name_of(command)}: {text}{_HINT}")
    return _of_connection(error, text, where) or _of_command(error, text, where, name_of(command))


def _of_connection(error: Exception, text: str, where: str) -> RedisError | None:
    """What is wrong with the way to Redis, or with all of it; None if the command is to blame."""
    if isinstance(error, redis.exceptions.InvalidResponse):
        return Unavailable(f"what answers at {where} is not Redis ({redacted(text)}); check host and port")
    if isinstance(error, redis.exceptions.AuthenticationError):
        return AccessDenied(f"{where} refuses the credentials ({text}); check user and password in the URL")
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return OutOfMemory(f"Redis at {where} has reached maxmemory and refuses writes: free memory or raise it")
    if isinstance(error, redis.exceptions.ReadOnlyError) and "+" not in where.partition("://")[0]:
        return Unavailable(
            f"Redis at {where} is a replica, which takes no writes: connect to its primary, or to what knows which that is "
            "(redis+sentinel://, redis+cluster://)"
        )
    if isinstance(error, (redis.exceptions.ReadOnlyError, redis.exceptions.ClusterError)):
        return Unavailable(f"Redis at {where} is failing over: {text}")
    if isinstance(error, (redis.exceptions.TryAgainError, redis.exceptions.SlotNotCoveredError)):
        return Unavailable(f"the cluster at {where} is moving slots: {text}")
    away = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, RedisClusterException, OSError)
    if isinstance(error, away):
        return Unavailable(f"Redis at {where} cannot be reached: {redacted(text)}")
    return None


def _of_command(error: Exception, text: str, where: str, name: str) -> RedisError:
    if isinstance(error, redis.exceptions.ClusterCrossSlotError):
        return CommandFailed(f"{name} names keys of several hash slots; give them one {{hash tag}}")
    if text.startswith("WRONGTYPE"):
        # A script's own message names the key; the server's names nothing.
        named = (
            text.removeprefix("WRONGTYPE ")
            if " holds a " in text
            else f"{name}: the key holds another type of value than this needs"
        )
        return WrongType(named)
    if text.startswith(("NOGROUP", "UNBLOCKED the stream key no longer exists")):
        return GroupMissing(text)
    if text.startswith(_AWAY):
        return Unavailable(f"Redis at {where} cannot serve now: {text}")
    code, _, detail = text.partition(" ")
    if not _CODE.fullmatch(code):
        return CommandFailed(f"{name}: {text}", detail=text)
    return CommandFailed(f"{name}: {text}", code=code, detail=detail)


# --- Scripts and keys ---


def _script_of(command: Command | None) -> Named | None:
    return known_scripts.get(command[1]) if command and command[0] in _SCRIPTS else None


def _place(found: re.Match[str], command: Command | None) -> str:
    """A line of a script, and the command on it: of what it has refused, Redis says no more than where."""
    words = _command_at(found, command)
    return f"({words and f'{words}, '}line {found[2]} of the script)"


def _command_at(found: re.Match[str], command: Command | None) -> str:
    number, script = int(found[2]), known_scripts.get(found[1]) if found[1] else _script_of(command)
    lines = script.text.splitlines() if script else []
    words = _COMMAND_IN_LUA.search(lines[number - 1]) if number <= len(lines) else None
    return " ".join(filter(None, words.groups())) if words else ""


def _listed(keys: Sequence[Arg]) -> str:
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return ", ".join(map(_shown, keys[:_MOST_KEYS])) + more


def _shown(part: Arg) -> str:
    return visible(to_wire(part) if isinstance(part, str) else part) if isinstance(part, (bytes, str)) else str(part)
