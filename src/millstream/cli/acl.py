"""`millstream acl`: prints the ACL rights that each kind of process needs in Redis."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from millstream.admin.acl import ANY, ROLES, AclRule, RoleName, acl_rule
from millstream.cli.options import Json
from millstream.cli.terminal import print_json, print_line, print_message
from millstream.redis_client.key_names import PREFIX


def acl(
    roles: Annotated[
        list[RoleName] | None, typer.Argument(help="The roles; default: all.", metavar="[ROLE]...")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="Name of one user with all of these roles; default: one user per role.")
    ] = None,
    stream: Annotated[
        list[str] | None, typer.Option(help="A stream, or a pattern of streams, to read or publish to; repeatable.")
    ] = None,
    into: Annotated[list[str] | None, typer.Option(help="A stream that handlers write to; repeatable.")] = None,
    app: Annotated[str | None, typer.Option(help="Only this app's handlers.")] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(help="A service to which streams are announced; repeatable. For those of handlers: --app."),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="For a Redis Cluster: run the lines on every node.")
    ] = False,
    replicas: Annotated[
        bool,
        typer.Option("--replicas", help="For reads from replicas in Spark (readFrom): run the lines on replicas, too."),
    ] = False,
    state_ttl: Annotated[
        bool,
        typer.Option("--state-ttl", help="For state_ttl_ms on Redis 7.4, Valkey 9 and newer; older ones need none."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print ACL SETUSER lines with the minimal rights of each role. Changes nothing.

    Roles: worker (millstream worker), spark (millstream run), source (spark.read and spark.readStream), group-source
    (the same with readAs=group), sink (df.write and df.writeStream in Spark), producer (Producer, millstream publish),
    leases (a Balancer; beside worker, for order="stream"), master and consumer (millstream master, and its consumers),
    router (millstream serve, or a Router), exporter (millstream exporter), console (millstream console) and operator
    (all commands for inspection and repair). Run the lines with
    redis-cli, then set a password for each user.
    """
    chosen = tuple(dict.fromkeys(roles or ROLES))
    users = {user: chosen} if user else {f"{PREFIX}-{role}": (role,) for role in chosen}
    services = service or (() if stream or app else (ANY,))
    found = [
        acl_rule(
            name,
            some,
            streams=stream or (ANY,),
            outputs=into or (),
            app=app,
            services=services,
            cluster=cluster,
            replicas=replicas,
            state_ttl=state_ttl,
        )
        for name, some in users.items()
    ]
    if as_json:
        print_json([{**asdict(one), "line": one.line} for one in found])
    else:
        _print_lines(found)


def _print_lines(found: Sequence[AclRule]) -> None:
    for one in found:
        print_line(one.line)
    if any(ANY in one.keys for one in found):
        print_message("some users get access to all keys: restrict it with --stream, --into, --app and --service")
    print_message("a user without a password cannot log in; set one for each: ACL SETUSER NAME '>PASSWORD'")
