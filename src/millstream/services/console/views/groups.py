"""The page of a consumer group: its consumers, and what sets its last delivered id."""

from shlex import quote

from starlette.responses import Response

from millstream.admin.group_moves import GroupMove, move, plan_move, why_not_moved
from millstream.errors import ConfigError, GroupMissing, MillstreamError
from millstream.groups import Group
from millstream.redis_client.escaping import escape
from millstream.services.console.pages import PageRequest


def group(page: PageRequest) -> Response:
    """One group of a stream."""
    stream, name = page.wanted_name("stream"), page.wanted_name("group")
    try:
        of = Group(page.client, stream, name)
        found, consumers = of.info(), of.consumers()
    except GroupMissing as error:
        raise MillstreamError(f"there is no group {name!r} on {stream} (any more)") from error
    return page.render(
        "group.html", stream=stream, found=found, consumers=consumers, refusal=why_not_moved(stream, name)
    )


def set_id(page: PageRequest) -> Response:
    """Set the last delivered id of a group, once what that does is confirmed."""
    stream, name = page.wanted_name("stream"), page.wanted_name("group")
    if reason := why_not_moved(stream, name):
        raise ConfigError(reason)
    try:
        planned = plan_move(page.client, stream, name, page.wanted("after"))
    except GroupMissing as error:
        raise MillstreamError(str(error)) from error
    fields = {"stream": escape(stream), "group": escape(name)}
    if page.field("confirm") != planned.direction:
        return _confirm(page, planned, fields)
    with page.audit("group set-id", **fields, before=planned.before, after=planned.to) as action:
        now = move(page.client, planned)
        action.result = f"moved from {planned.before} to {now}: {planned.describe()}"
    return page.redirect("/group", **fields, done="moved")


def _confirm(page: PageRequest, planned: GroupMove, fields: dict[str, str]) -> Response:
    sentences = [
        f"It would move from {planned.before} to {planned.to}: {planned.describe()}.",
        "While its consumers read, the figures change: stop them first to be sure.",
    ]
    if page.field("confirm"):
        sentences = ["The group has moved past this id since that was asked.", *sentences]
    where = quote(planned.after)
    return page.render(
        "confirm.html",
        question=f"Set the last delivered id of group {fields['group']} of {fields['stream']}",
        sentences=sentences,
        path="/group/set-id",
        fields={**fields, "after": planned.after, "confirm": planned.direction},
        typed=None,
        command=f"millstream group set-id {quote(fields['stream'])} {quote(fields['group'])} --after {where}",
        back=page.url("/group", **fields),
    )
