"""Follower: follows streams for `millstream tail` with one router, and discovers new streams of patterns."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence

from millstream.errors import AccessDenied, Unavailable, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.router import BEGINNING, END, Item, Router, Start, Subscription

logger = logging.getLogger(__name__)

_MAX_ITEMS_AT_ONCE = 500
_SCAN_INTERVAL_S = 0.5
_SCAN_PAUSE_RATIO = 20
"""Pause between two scans, as a multiple of the duration of the last."""

StartIds = Callable[[Sequence[str]], Mapping[str, str]]
"""From names of streams to the id after which to start on each."""


class Follower:
    """Passes the entries of streams to `show`, until it returns True.

    `places` gives the ids after which to start on the streams that exist at first. Streams of a pattern that are
    created later are followed from their beginning, as all of their entries are new. `on_begun` is called once with the
    number of followed streams: every entry added from then on is shown.
    """

    def __init__(
        self,
        client: Client,
        router: Router,
        *,
        places: StartIds,
        show: Callable[[Item], bool],
        on_begun: Callable[[int], None],
    ) -> None:
        self._client = client
        self._router = router
        self._start_ids = places
        self._show = show
        self._on_started: Callable[[int], None] | None = on_begun
        self._starting: set[str] = set()
        self._is_scanned = False
        self._known: set[str] = set()
        self._denied: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, names: Sequence[str], patterns: Sequence[str]) -> None:
        """Follow until `show` returns True. Raises RedisError if a stream given by name cannot be read."""
        for name, place in self._start_ids(names).items():
            self._start_task(self._follow(self._subscribe(name, place)))
        if patterns:
            self._start_task(self._discover(patterns))
        else:
            self._is_scanned = True
            self._notify_if_started()
        try:
            await self._ended
        finally:
            rest = tuple(self._tasks)
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    def _subscribe(self, name: str, place: str) -> Subscription:
        self._known.add(name)
        if place == END:  # its id is known only when the server has answered
            self._starting.add(name)
        return self._router.subscribe(name, after=place, report_start=True)

    def _on_stream_started(self, name: str) -> None:
        self._starting.discard(name)
        self._notify_if_started()

    def _notify_if_started(self) -> None:
        """Call `on_begun` once: when all existing streams are subscribed, and each has its start id."""
        if self._on_started is not None and self._is_scanned and not self._starting:
            self._on_started(len(self._known))
            self._on_started = None

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def _follow(self, subscription: Subscription) -> None:
        async for first in subscription:
            item: Item | None = first
            left = _MAX_ITEMS_AT_ONCE
            while item is not None and not self._ended.done():
                if isinstance(item, Start):
                    self._on_stream_started(item.stream)
                if self._show(item):
                    self._ended.set_result(None)
                left -= 1
                item = subscription.get(0) if left else None
            sys.stdout.flush()
            await asyncio.sleep(0)  # so that a long stream does not delay the others

    async def _follow_matched(self, subscription: Subscription) -> None:
        try:
            await self._follow(subscription)
        except (WrongType, AccessDenied) as error:  # only a pattern matched it
            logger.warning("tail skips the stream %s: %s", escape(subscription.stream), error)
            self._known.discard(subscription.stream)
            if isinstance(error, AccessDenied):  # a key of another type may become a stream again
                self._denied.add(subscription.stream)
            self._on_stream_started(subscription.stream)

    async def _discover(self, patterns: Sequence[str]) -> None:
        """Scan for streams of the patterns periodically: the longer a scan takes, the less often."""
        places = self._start_ids
        while True:
            began = time.monotonic()
            try:
                found = await asyncio.to_thread(self._scan, patterns)
                new = sorted(found - self._known - self._denied)
                for name, place in (await asyncio.to_thread(places, new)).items():
                    self._start_task(self._follow_matched(self._subscribe(name, place)))
                places = _from_their_beginning
                self._is_scanned = True
                self._notify_if_started()
            except Unavailable as error:
                logger.debug("cannot scan for streams, Redis is unavailable: %s; retrying", error)
            await asyncio.sleep(max(_SCAN_INTERVAL_S, _SCAN_PAUSE_RATIO * (time.monotonic() - began)))

    def _scan(self, patterns: Sequence[str]) -> set[str]:
        return {name for pattern in patterns for name in self._client.scan_streams(pattern)}


def _from_their_beginning(names: Sequence[str]) -> Mapping[str, str]:
    return dict.fromkeys(names, BEGINNING)
