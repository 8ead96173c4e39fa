"""The arguments STREAM and GROUP, and how a group is found by them."""

from typing import Annotated

import typer

from millstream.admin.group_moves import group_missing
from millstream.groups import Group, GroupInfo
from millstream.redis_client.client import Client

Stream = Annotated[str, typer.Argument(help="The stream.", metavar="STREAM")]
GroupName = Annotated[str, typer.Argument(help="The group.", metavar="GROUP")]


def find_group(client: Client, stream: str, group: str) -> GroupInfo:
    """The figures of a group. Raises GroupMissing, which names the command that lists the others, and RedisError."""
    found = Group(client, stream, group).info()
    if found is None:
        raise group_missing(stream, group)
    return found
