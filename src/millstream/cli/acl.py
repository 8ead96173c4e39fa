"""`millstream acl`: the rights that workers, pipelines, producers, balancers, routers and operators need in Redis."""

from dataclasses import asdict
from typing import Annotated

import typer

from millstream.admin.acl import ANY, ROLES, RoleName, rule
from millstream.cli.options import Json
from millstream.cli.terminal import say, say_json, talk
from millstream.redis_client.key_names import PREFIX


def acl(
    roles: Annotated[
        list[RoleName] | None, typer.Argument(help="Which; without any, each.", metavar="[ROLE]...")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="The name of one user who is all of them; by default each role has its own.")
    ] = None,
    stream: Annotated[
        list[str] | None, typer.Option(help="A stream that is read or published to, or a pattern; may be repeated.")
    ] = None,
    into: Annotated[list[str] | None, typer.Option(help="A stream that handlers write to; may be repeated.")] = None,
    app: Annotated[str | None, typer.Option(help="Only this app's handlers.")] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(help="A service that streams are announced to; may be repeated. Handlers' own: --app."),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="For a Redis Cluster: run the lines on every node.")
    ] = False,
    replicas: Annotated[
        bool,
        typer.Option("--replicas", help="For reading from replicas in Spark (readFrom): run the lines on them, too."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print ACL SETUSER lines with the rights that are needed, and no more. Nothing is changed.

    Roles: worker (millstream worker), spark (millstream run), source (spark.read and spark.readStream), group-source (the same
    with readAs=group), sink (df.write and df.writeStream in Spark), producer (Producer, millstream publish), leases (a Balancer; beside worker, for
    order="stream"), master and consumer (millstream master, and who gets messages from it), router (millstream serve, or
    a Router) and operator (all commands that look or mend). Run the lines with redis-cli, then give each user a password.
    """
    chosen = tuple(dict.fromkeys(roles or ROLES))
    users = {user: chosen} if user else {f"{PREFIX}-{role}": (role,) for role in chosen}
    services = service or (() if stream or app else (ANY,))
    found = [
        rule(
            name,
            some,
            streams=stream or (ANY,),
            outputs=into or (),
            app=app,
            services=services,
            cluster=cluster,
            replicas=replicas,
        )
        for name, some in users.items()
    ]
    if as_json:
        say_json([{**asdict(one), "line": one.line} for one in found])
        return
    for one in found:
        say(one.line)
    if any(ANY in one.keys for one in found):
        talk("some users may use every key: --stream, --into, --app and --service narrow it down")
    talk("a user without a password cannot log in; give each one, as in: ACL SETUSER NAME '>PASSWORD'")
