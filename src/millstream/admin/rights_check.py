"""Check of the ACL rights of a Redis user: which roles of `millstream acl` it has the rights of."""

from collections.abc import Iterator

from millstream.admin.acl import ROLES
from millstream.admin.findings import Finding
from millstream.redis_client.client import Client
from millstream.redis_client.pipelining import call_all

_MOST_NAMED = 5


def check_rights(client: Client) -> Iterator[Finding]:
    """The roles whose commands this user may run, and what it lacks for the others. Keys are not checked.

    Raises RedisError, AccessDenied above all: the check itself needs rights.
    """
    user = client.execute("ACL", "WHOAMI").decode()
    denied = _denied(client, user, sorted({name for role in ROLES.values() for name in role.commands(by_pattern=True)}))
    lacking = {
        name: sorted((role.commands(by_pattern=True) - set(role.optional.split())) & denied)
        for name, role in ROLES.items()
    }
    able = [name for name, commands in lacking.items() if not commands]
    if len(able) == len(ROLES):
        yield Finding(check="rights", severity="ok", what=f"the Redis user {user} has the rights of all roles")
        return
    for name, commands in lacking.items():
        if commands and not able:
            some = ", ".join(commands[:_MOST_NAMED]) + (", ..." if len(commands) > _MOST_NAMED else "")
            yield Finding(
                check="rights",
                severity="warning",
                what=f"the Redis user {user} is no {name}: it lacks {some}",
                why="a process of this kind is refused at its start",
                mend=(f"millstream acl {name} --user {user}",),
            )
    if able:
        yield Finding(check="rights", severity="ok", what=f"the Redis user {user} has the rights of: {', '.join(able)}")


def _denied(client: Client, user: str, commands: list[str]) -> set[str]:
    """Those of `commands` that the user may not run, whatever their keys (Redis ACL DRYRUN)."""
    infos = call_all(client, [("COMMAND", "INFO", name) for name in commands])
    known = [(name, abs(info[0][1])) for name, info in zip(commands, infos, strict=True) if info and info[0]]
    replies = call_all(
        client,
        [("ACL", "DRYRUN", user, *name.split("|"), *["1"] * (arity - 1 - name.count("|"))) for name, arity in known],
    )
    return {name for (name, _), reply in zip(known, replies, strict=True) if b" to run the " in reply}
