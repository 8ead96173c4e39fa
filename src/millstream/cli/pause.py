"""`millstream pause` and `millstream resume`: stops and resumes reading by a handler's workers."""

from millstream.admin.handler_names import find_handler
from millstream.cli.handler_names import HandlerName, OnStream
from millstream.cli.options import Json, Url
from millstream.cli.recorded_action import on_stream, recorded
from millstream.cli.terminal import print_json, print_line
from millstream.delivery.commit_store import CommitStore
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import pluralize


def pause(handler: HandlerName, stream: OnStream = None, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Stop a handler from reading new messages. Workers, and runs on Spark, finish what is in flight; `resume` continues."""
    _set(handler, stream, url, paused=True, as_json=as_json)


def resume(handler: HandlerName, stream: OnStream = None, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Resume a paused handler."""
    _set(handler, stream, url, paused=False, as_json=as_json)


def _set(name: str, stream: str | None, url: str, *, paused: bool, as_json: bool) -> None:
    done = "paused" if paused else "resumed"
    with Client(url) as client:
        found = find_handler(client, name, stream)
        with recorded(client, "pause" if paused else "resume", handler=name, stream=on_stream(stream)) as action:
            store = CommitStore(client, app=found[0].app, handler=found[0].handler)
            store.set_paused([one.stream for one in found], paused=paused)
            action.result = f"{done} on {pluralize(len(found), 'stream')}"
    if as_json:
        streams = [one.stream for one in found]
        print_json({"app": found[0].app, "handler": found[0].handler, "streams": streams, "paused": paused})
        return
    for one in found:
        print_line(f"{one.label} is {done} on {escape(one.stream)}")
