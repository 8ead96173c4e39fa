"""Translates errors of redis-py and Redis into `millstream.errors`: the only module that knows their texts.

Redis 7.0, Redis 7.2 and later, and Valkey word the same error differently; all wordings are handled here. Where Redis
has no code of its own for a cause, the cause becomes a class or a property of the error: callers never look at texts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import millstream.redis_client.redis_py  # noqa: F401 - before redis itself

# isort: split
import redis
from redis.exceptions import RedisClusterException

from millstream.errors import (
    AccessDenied,
    CommandFailed,
    ConfigError,
    GroupMissing,
    KeyMissing,
    OutOfMemory,
    RedisError,
    ScriptMissing,
    Unavailable,
    WrongType,
)
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import PREFIX, to_wire
from millstream.redis_client.redaction import redact_text, redact_url
from millstream.redis_client.resp import Arg, Command, routing_key
from millstream.redis_client.urls import explain_refusal

REDIS_ERRORS = (redis.exceptions.RedisError, RedisClusterException, OSError)

_AWAY = ("BUSY ", "MISCONF", "NOREPLICAS", "UNKILLABLE", "UNBLOCKED")
_DENIED_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")
"""Texts of Redis 7.0, and of later versions and Valkey, for a command in a script that its user may not run."""

_KEY_DENIED = ("no permissions to access", "No permissions to access", "can't access")
"""Texts of Redis 7.0, of later versions and Valkey, and of Redis 7.0 in a script, for a key that the user may not use."""

_UNAUTHENTICATED, _NO_AUTH = "Protocol error: unauthenticated ", "Authentication required."
"""What Redis answers before it closes the connection of a client without credentials, if a command has more than ten
arguments or a long one; and what it answers to other commands, as redis-py has it.
"""

_KEY_MISSING = ("no such key", "requires the key to exist")
_PLACE_IN_SCRIPT = re.compile(r"script: (?:([0-9a-f]{40}), )?on @user_script:(\d+)\.?")  # Valkey 9 omits the hash
_CODE = re.compile("[A-Z]{2,}")
_NO_HANDSHAKE = "Timeout connecting to server"
_CONNECTING = re.compile(r"Error(?: -?\d+)? connecting to (\S+)\. (.+?)\.*")
_NO_PRIMARY = re.compile(r"No master found for ('.*?')(?: : |$)")
_NAMED_BY_SCRIPT = re.compile(r" \(([A-Z]+) (?!.*, line \d+ of)(.*)\)$", re.DOTALL)  # by `named` of refusal.lua
_COMMAND_IN_LUA = re.compile(r"\('([A-Z]+)'(?:, '([A-Z]+)')?(?:, KEYS\[(\d+)\])?")
_TYPES = {"X": "stream", "H": "hash", "Z": "zset", "B": "list", "L": "list", "R": "list", "S": "set"}
"""The type of key that a command needs, by the first letter of its name."""

_SCRIPTS, _READS, _WITH_SUBCOMMAND = ("EVAL", "EVALSHA"), ("XREAD", "XREADGROUP"), ("XINFO", "XGROUP")
_MOST_KEYS = 4
_MEND_KEY = ": rename or delete that key"
_HINT = "; `millstream acl` prints the required rights"


class NamedScript(Protocol):
    """A script, as error texts need it."""

    name: str

    @property
    def text(self) -> str:
        """Its full text."""
        ...


known_scripts: dict[Arg, NamedScript] = {}
"""The scripts called so far, by hash and by text."""


def keys_of(command: Command) -> Sequence[Arg]:
    """The keys in a command."""
    if command[0] in _SCRIPTS:
        return command[3 : 3 + int(command[2])]
    if command[0] in _READS:
        streams = list(command[[str(part).upper() for part in command].index("STREAMS") + 1 :])
        return streams[: len(streams) // 2]
    key = routing_key(command)
    return () if key is None else (key,)


def describe_command(command: Command | None) -> str:
    """The command and its key, for error texts; for a script its name, as a hash means nothing to a reader."""
    if not command:
        return "the command"
    if command[0] in _SCRIPTS:
        return f"the script {script.name}.lua" if (script := _script_of(command)) else "an unnamed script"
    if command[0] in _READS:
        return f"{command[0]} on {_listed(keys_of(command))}"
    words = command[: 3 if command[0] in _WITH_SUBCOMMAND else 2]
    return " ".join(_shown(part) for part in words)[:120]


def wrong_type_error(text: str, command: Command, types: Mapping[Arg, str]) -> WrongType | None:
    """The error after WRONGTYPE that names the key: of the `types` of the keys of `command`, or of its script.

    None if each key has the type that is needed. The line of the script that Redis names mostly names the key, too.
    """
    place = _PLACE_IN_SCRIPT.search(text)
    *verb, number = _words_at(place, command) if place else (str(command[0]), "")
    needed = _TYPES.get(verb[0][:1].upper(), "string")
    wrong = [key for key, found in types.items() if found not in ("none", needed)]
    own = f"{PREFIX}:".encode()
    # Otherwise the keys of users, which are streams, come first if a stream is needed, and our own ones if not.
    wrong.sort(key=lambda key: _wire_of(key).startswith(own) == (needed == "stream"))
    at_line = keys_of(command)[int(number) - 1] if number else None
    key = at_line if at_line in wrong else next(iter(wrong), None)
    if key is None:
        return None
    found = f"{_shown(key)} holds a {types[key]} where a {needed} is needed{_MEND_KEY}"
    return WrongType(f"{describe_command(command)}: {found}", names_key=True)


def not_a_stream(stream: str) -> WrongType:
    """The error about a name whose key holds another type of value than a stream."""
    return WrongType(f"{escape(stream)} is not a stream{_MEND_KEY}", names_key=True)


def with_denied_keys(error: RedisError, keys: Sequence[Arg]) -> AccessDenied:
    """The AccessDenied error with the names of the denied keys, or of all candidates."""
    return AccessDenied(f"{str(error).removesuffix(_HINT)}: {_listed(keys)}{_HINT}", concerns_key=True)


def denies_key(text: str) -> bool:
    """Whether an error reply of Redis says that the user may not access the key."""
    return any(words in text for words in _KEY_DENIED)


def breaks_connection(error: Exception) -> bool:
    """Whether no reply comes after this error.

    redis-py's ConnectionError includes LOADING and the like, which are replies and not broken connections.
    """
    if isinstance(error, redis.exceptions.ConnectionError):
        return not isinstance(error, (redis.exceptions.BusyLoadingError, redis.exceptions.AuthenticationError))
    return _lacks_credentials(str(error))


def _lacks_credentials(text: str) -> bool:
    """Whether Redis answers with this error, and closes the connection, as its client has given no credentials."""
    return text.startswith(_UNAUTHENTICATED)


def translate(error: Exception, url: str, command: Command | None = None) -> RedisError:
    """Translate an exception of redis-py into a RedisError. Raises ConfigError for a wrong URL."""
    text = _PLACE_IN_SCRIPT.sub(lambda found: _place(found, command), str(error))
    where = redact_url(url)
    if isinstance(error, RedisClusterException) and isinstance(
        why := error.__cause__ or error.__context__, REDIS_ERRORS
    ):
        return translate(why, url, command)  # the cause: the error of the last node
    if command is None and (wrong := explain_refusal(text, where)):
        raise ConfigError(wrong) from error
    if isinstance(error, redis.exceptions.NoScriptError):
        return ScriptMissing(f"{describe_command(command)} is not on the server")
    denied = (redis.exceptions.NoPermissionError, redis.exceptions.AuthorizationError)
    if isinstance(error, denied) or any(words in text for words in _DENIED_IN_SCRIPT):
        refused = f"the Redis user may not do {describe_command(command)}: {text}{_HINT}"
        return AccessDenied(refused, concerns_key=denies_key(text))
    return _of_connection(error, text, where) or _of_command(error, text, where, describe_command(command))


def _of_connection(error: Exception, text: str, where: str) -> RedisError | None:
    """An error of the connection or the whole server; None if it concerns the command only."""
    if isinstance(error, redis.exceptions.InvalidResponse):
        return Unavailable(f"the server at {where} is not Redis ({redact_text(text)}); check host and port")
    if isinstance(error, redis.exceptions.AuthenticationError) or _lacks_credentials(text):
        why = _NO_AUTH if _lacks_credentials(text) else text
        refused = f"{where} refuses the credentials ({why}); check user and password in the URL"
        return AccessDenied(refused, concerns_credentials=True)
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return OutOfMemory(f"Redis at {where} has reached maxmemory and refuses writes: free memory or raise it")
    if isinstance(error, redis.exceptions.ReadOnlyError) and "+" not in where.partition("://")[0]:
        return Unavailable(
            f"Redis at {where} is a replica, which accepts no writes: connect to its primary, "
            "or let Sentinel or the cluster find it (redis+sentinel://, redis+cluster://)"
        )
    if isinstance(error, (redis.exceptions.ReadOnlyError, redis.exceptions.ClusterError)):
        return Unavailable(f"Redis at {where} is failing over: {text}")
    if isinstance(error, (redis.exceptions.TryAgainError, redis.exceptions.SlotNotCoveredError)):
        return Unavailable(f"the cluster at {where} is moving slots: {text}")
    away = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, RedisClusterException, OSError)
    if isinstance(error, away):
        why = redact_text(_why_unreached(text, where))
        return Unavailable(f"Redis at {where} cannot be reached: {why}", unreachable=True)
    return None


def _why_unreached(text: str, where: str) -> str:
    """The reason in redis-py's text, which says again what the URL says, or shows an object."""
    if found := _CONNECTING.fullmatch(text):
        place, why = found.groups()
        return f"{'' if place in where else f'{place}: '}{why[:1].lower()}{why[1:]}"
    if found := _NO_PRIMARY.match(text):
        return f"no Sentinel that answers knows a primary {found[1]} that is up"
    if text == _NO_HANDSHAKE and where.startswith("rediss"):  # a server without TLS waits for the rest of a command
        return f"{text}; rediss:// needs a port that speaks TLS"
    return text


def _of_command(error: Exception, text: str, where: str, name: str) -> RedisError:
    if isinstance(error, redis.exceptions.ClusterCrossSlotError):
        return CommandFailed(f"{name} has keys in several hash slots; give them one {{hash tag}}")
    if text.startswith("WRONGTYPE"):
        # A script's own message names the key; that of the server does not.
        if " holds a " in text:
            return WrongType(text.removeprefix("WRONGTYPE ") + _MEND_KEY, names_key=True)
        if found := _NAMED_BY_SCRIPT.search(text):
            needed = _TYPES.get(found[1][:1], "string")
            where = f"{_shown(found[2])} holds another type of value than a {needed}"
            return WrongType(f"{name}: {where}{_MEND_KEY}", names_key=True)
        return WrongType(f"{name}: the key holds another type of value than needed{_MEND_KEY}")
    if text.startswith(("NOGROUP", "UNBLOCKED the stream key no longer exists")):
        return GroupMissing(text)
    if text.startswith(_AWAY):
        return Unavailable(f"Redis at {where} is temporarily unavailable: {text}")
    code, _, detail = text.partition(" ")
    if not _CODE.fullmatch(code):
        code, detail = "", text
    kind = KeyMissing if not code and any(words in text for words in _KEY_MISSING) else CommandFailed
    return kind(f"{name}: {text}", code=code, detail=detail)


# --- Scripts and keys ---


def _script_of(command: Command | None) -> NamedScript | None:
    return known_scripts.get(command[1]) if command and command[0] in _SCRIPTS else None


def _place(found: re.Match[str], command: Command | None) -> str:
    """The line of a script and the command on it: Redis itself reports only the line of a denied command."""
    words = _command_at(found, command)
    return f"({words and f'{words}, '}line {found[2]} of the script)"


def _command_at(found: re.Match[str], command: Command | None) -> str:
    return " ".join(filter(None, _words_at(found, command)[:2]))


def _words_at(found: re.Match[str], command: Command | None) -> tuple[str, str, str]:
    """The command on a line of a script, its subcommand, and the number of its key in KEYS; "" if it is not there."""
    number, script = int(found[2]), known_scripts.get(found[1]) if found[1] else _script_of(command)
    lines = script.text.splitlines() if script else []
    words = _COMMAND_IN_LUA.search(lines[number - 1]) if number <= len(lines) else None
    verb, subcommand, key = words.groups("") if words else ("", "", "")
    return verb, subcommand, key


def _listed(keys: Sequence[Arg]) -> str:
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return ", ".join(map(_shown, keys[:_MOST_KEYS])) + more


def _wire_of(part: Arg) -> bytes:
    return part if isinstance(part, bytes) else to_wire(str(part))


def _shown(part: Arg) -> str:
    return escape(_wire_of(part)) if isinstance(part, (bytes, str)) else str(part)
