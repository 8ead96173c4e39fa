"""The arguments STREAM and GROUP, and how a group is found by them."""

from typing import Annotated

import typer

from millstream.errors import GroupMissing
from millstream.groups import Group, GroupInfo
from millstream.redis_client.client import Client

Stream = Annotated[str, typer.Argument(help="The stream.", metavar="STREAM")]
GroupName = Annotated[str, typer.Argument(help="The group.", metavar="GROUP")]


def find_group(client: Client, stream: str, group: str) -> GroupInfo:
    """The figures of a group. Raises GroupMissing, which names the command that lists the others, and RedisError."""
    found = Group(client, stream, group).info()
    if found is None:
        raise GroupMissing(f"there is no group {group!r} on {stream}; see: millstream group list {stream}")
    return found
