"""Forgetting: finds and removes all that a handler, a stage or a whole app has left in Redis, but no stream of messages.

Keys are found by their names (SCAN), not by what the handler's metadata say: so an interrupted removal can be repeated,
and what a lost stream has left is found as well.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from millstream.admin.inspection import handler_of, inspect
from millstream.admin.liveness import find_runs
from millstream.admin.reports import Inspection
from millstream.balancer.protocol import disown_service
from millstream.errors import ConfigError, MillstreamError
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import (
    MASTER,
    PREFIX,
    HandlerKeys,
    ServiceKeys,
    check_identifier,
    hash_tag,
    live_workers_key,
    ready_streams_key,
    stage_of,
    to_wire,
    worker_name_key,
)
from millstream.redis_client.pipelining import send_all

_SIZES = {b"state": "HLEN", b"dead": "XLEN"}
_OF_LETTERS = (b"dead", b"resent")
"""The ends of keys that stay as long as dead letters do."""

_MOST_NAMED = 5


@dataclass(slots=True)
class Remains:
    """The data that a handler or stage has left.

    * `streams`: those on which it has keys or a group; `keys`: the number of its keys, without dead letters
    * `groups`, `pending`: its consumer groups, and their pending entries
    * `states`, `dead_letters`: keys with a state; dead letters in its queues
    """

    app: str
    name: str
    streams: set[str] = field(default_factory=set)
    keys: int = 0
    groups: int = 0
    pending: int = 0
    states: int = 0
    dead_letters: int = 0

    @property
    def label(self) -> str:
        """The name shown to users."""
        return f"{self.app}.{self.name}"


class Forgetting:
    """Removes what the handler or stage `name` of `app` has left, or all handlers and stages of the app if it is None.

    Dead letters stay unless `dead_letters`. Streams of messages, delayed messages, partition maps and services with a
    name of their own are not the handler's, and stay. Raises ConfigError for invalid names.
    """

    def __init__(self, client: Client, app: str, name: str | None, *, dead_letters: bool) -> None:
        if check_identifier("app", app) == MASTER:
            raise ConfigError(f"{MASTER!r} is no app: the groups of masters belong to other programs")
        self._client = client
        self._app = app
        self._name = name if name is None else check_identifier("handler", name)
        self._dead_letters = dead_letters
        self._owner = re.compile(
            b":%s\\.(%s)(?=:)" % (app.encode(), name.encode() if name is not None else b"[A-Za-z0-9_-]{1,100}")
        )

    def find(self) -> list[Remains]:
        """The remains, by name; changes nothing. Raises MillstreamError while a worker or a run is alive."""
        found = inspect(self._client, budget_ms=0)
        self._check_dead(found)
        remains: dict[str, Remains] = {}
        for stream, _, name, pending in self._groups(found):
            one = self._remains(remains, name)
            one.streams.add(stream)
            one.groups += 1
            one.pending += pending
        for page in self._pages(found):
            self._count(remains, page)
        for name in self._service_names(found, remains):
            own = ServiceKeys.of_handler(f"{self._app}.{name}")
            count = sum(len(page) for page in self._client.scan_key_pages(f"{own.base}:*"))
            count += self._client.execute("EXISTS", own.input)
            if count:
                self._remains(remains, name).keys += count
        return sorted(remains.values(), key=lambda one: one.name)

    def remove(self) -> None:
        """Remove it, page by page. May be interrupted and repeated. Raises as `find`."""
        found = inspect(self._client, budget_ms=0)
        self._check_dead(found)
        names = {name for *_, name, _ in self._groups(found)}
        for page in self._pages(found):
            names.update(name for _, _, name, _ in page)
            self._unlink(key for key, _, _, kind in page if kind not in _OF_LETTERS or self._dead_letters)
        for name in self._service_names(found, names):
            own = ServiceKeys.of_handler(f"{self._app}.{name}")
            disown_service(self._client, own.label)
            for keys in self._client.scan_key_pages(f"{own.base}:*"):
                self._unlink(keys)
            self._unlink([to_wire(own.input)])
        self._unlink(self._process_keys(found, names))
        groups = [("XGROUP", "DESTROY", to_wire(stream), to_wire(group)) for stream, group, *_ in self._groups(found)]
        for reply in send_all(self._client, groups):
            raise_if_error(reply)

    # What is its own

    def _check_dead(self, found: Inspection) -> None:
        """Raise MillstreamError if a worker, or a run on Spark, is alive."""
        alive = {
            f"{one.label}: {name}"
            for one in found.handlers
            if self._is_chosen(one.app, one.handler)
            for name in one.workers
        }
        names = {(self._app, name) for *_, name, _ in self._groups(found)}
        names |= {(one.app, one.handler) for one in found.handlers if self._is_chosen(one.app, one.handler)}
        alive |= {f"{app}.{name}: a run on Spark" for app, name in find_runs(self._client, names)}
        if alive:
            some = ", ".join(sorted(alive)[:_MOST_NAMED])
            raise MillstreamError(
                f"still alive, or within the last minute: {some}; stop its workers and runs first, and repeat this"
            )

    def _is_chosen(self, app: str, name: str) -> bool:
        return app == self._app and self._name in (None, name)

    def _remains(self, remains: dict[str, Remains], name: str) -> Remains:
        return remains.setdefault(name, Remains(self._app, name))

    def _groups(self, found: Inspection) -> Iterator[tuple[str, str, str, int]]:
        """Stream, group, name of the handler or stage, and number of pending entries, of each group that is its own."""
        for stream in found.streams:
            for group in stream.groups:
                handler = handler_of(stream.name, group.name)
                app, name = (handler.app, handler.handler) if handler else stage_of(group.name) or ("", "")
                if self._is_chosen(app, name):
                    yield stream.name, group.name, name, group.pending

    def _pages(self, found: Inspection) -> Iterator[list[tuple[bytes, str, str, bytes]]]:
        """Key, stream, name of the handler, and last part of the key, of each key that is its own, page by page."""
        others = tuple(
            to_wire(HandlerKeys(one.app, one.handler, one.stream).base) + b":"
            for one in found.handlers
            if not self._is_chosen(one.app, one.handler)
        )
        # A stream may be named as the key of another stream's handler is, and have keys of its own.
        names = [one.name for one in found.streams if self._owner.search(to_wire(one.name) + b":")]
        pattern = f"{PREFIX}:{{*:{self._app}.{self._name or '*'}:*"
        for page in self._client.scan_key_pages(pattern):
            yield [one for key in page if not key.startswith(others) and (one := self._parse(key, names))]

    def _parse(self, key: bytes, streams: Sequence[str]) -> tuple[bytes, str, str, bytes] | None:
        """Stream, name and last part of a key; None if it is no key of the handler, but named like one."""
        text = key.removeprefix(f"{PREFIX}:{{".encode())
        tag, separator, rest = text.partition(b"}:")
        longest = max((len(to_wire(name)) for name in streams if rest.startswith(to_wire(name) + b":")), default=0)
        for owner in self._owner.finditer(rest if separator else b""):
            stream = rest[: owner.start()].decode("utf-8", "surrogateescape")
            if owner.start() >= longest and to_wire(hash_tag(stream)) == tag:
                return key, stream, owner[1].decode(), rest[owner.end() + 1 :]
        return None

    def _count(self, remains: dict[str, Remains], page: Sequence[tuple[bytes, str, str, bytes]]) -> None:
        sized = [(_SIZES[kind], key) for key, _, _, kind in page if kind in _SIZES]
        sizes = dict(zip([key for _, key in sized], send_all(self._client, sized), strict=True))
        for key, stream, name, kind in page:
            one = self._remains(remains, name)
            one.streams.add(stream)
            if kind == b"dead":
                one.dead_letters += raise_if_error(sizes[key])
            elif kind not in _OF_LETTERS:
                one.keys += 1
                one.states += raise_if_error(sizes[key]) if key in sizes else 0

    def _service_names(self, found: Inspection, names: Iterable[str]) -> list[str]:
        """The handlers that may have a service of their own: those found, and those with an input stream alone."""
        known = {one.handler for one in found.handlers if self._is_chosen(one.app, one.handler)}
        return sorted({*known, *names, *((self._name,) if self._name else ())})

    def _process_keys(self, found: Inspection, names: Iterable[str]) -> Iterator[bytes]:
        """Names and ends of worker processes are the app's: they stay as long as another handler of it does."""
        if all(self._is_chosen(one.app, one.handler) for one in found.handlers if one.app == self._app):
            for page in self._client.scan_key_pages(worker_name_key(self._app, "*")):
                yield from page
        else:
            for name in names:
                yield to_wire(ready_streams_key(self._app, name))
                yield to_wire(live_workers_key(self._app, name))

    def _unlink(self, keys: Iterable[bytes]) -> None:
        for reply in send_all(self._client, [("UNLINK", key) for key in keys]):
            raise_if_error(reply)
