"""Following streams for `millstream tail`: any number of them over one router, and those of patterns as they are made."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence

from millstream.errors import AccessDenied, Unavailable, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import visible
from millstream.router import BEGINNING, END, Item, Router, Start, Subscription

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 500
_LOOK_S = 0.5
_LOOKING_SHARE = 20


Places = Callable[[Sequence[str]], Mapping[str, str]]


class Follower:
    """Gives `show` what comes on streams, until that says that it is enough.

    `places` says after which ids to begin on streams that are there at the start. Those of a pattern that are made later
    are followed from their beginning: all of them is new. `on_begun` is told once how many streams are followed: whatever is
    added to them from then on is shown.
    """

    def __init__(
        self,
        client: Client,
        router: Router,
        *,
        places: Places,
        show: Callable[[Item], bool],
        on_begun: Callable[[int], None],
    ) -> None:
        self._client = client
        self._router = router
        self._places = places
        self._show = show
        self._on_begun: Callable[[int], None] | None = on_begun
        self._beginning: set[str] = set()
        self._looked = False
        self._known: set[str] = set()
        self._denied: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, names: Sequence[str], patterns: Sequence[str]) -> None:
        """Until `show` has enough. Raises RedisError if a stream that is named cannot be read."""
        for name, place in self._places(names).items():
            self._begin(self._follow(self._subscribe(name, place)))
        if patterns:
            self._begin(self._look(patterns))
        else:
            self._looked = True
            self._tell_begun()
        try:
            await self._ended
        finally:
            rest = tuple(self._tasks)
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    def _subscribe(self, name: str, place: str) -> Subscription:
        self._known.add(name)
        if place == END:  # where that is, is known when the server has said so
            self._beginning.add(name)
        return self._router.subscribe(name, after=place, report_start=True)

    def _has_begun(self, name: str) -> None:
        self._beginning.discard(name)
        self._tell_begun()

    def _tell_begun(self) -> None:
        """Say once that all streams that were there have been subscribed to, and each has begun."""
        if self._on_begun is not None and self._looked and not self._beginning:
            self._on_begun(len(self._known))
            self._on_begun = None

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def _follow(self, subscription: Subscription) -> None:
        async for first in subscription:
            item: Item | None = first
            left = _MOST_AT_ONCE
            while item is not None and not self._ended.done():
                if isinstance(item, Start):
                    self._has_begun(item.stream)
                if self._show(item):
                    self._ended.set_result(None)
                left -= 1
                item = subscription.get(0) if left else None
            sys.stdout.flush()
            await asyncio.sleep(0)  # a long stream hides no other

    async def _follow_found(self, subscription: Subscription) -> None:
        try:
            await self._follow(subscription)
        except (WrongType, AccessDenied) as error:  # nobody has named it
            logger.warning("tail leaves out %s: %s", visible(subscription.stream), error)
            self._known.discard(subscription.stream)
            if isinstance(error, AccessDenied):  # the other may become a stream again
                self._denied.add(subscription.stream)
            self._has_begun(subscription.stream)

    async def _look(self, patterns: Sequence[str]) -> None:
        """Find the streams of the patterns, again and again: the more keys there are, the less often."""
        places = self._places
        while True:
            began = time.monotonic()
            try:
                found = await asyncio.to_thread(self._scan, patterns)
                new = sorted(found - self._known - self._denied)
                for name, place in (await asyncio.to_thread(places, new)).items():
                    self._begin(self._follow_found(self._subscribe(name, place)))
                places = _from_their_beginning
                self._looked = True
                self._tell_begun()
            except Unavailable as error:
                logger.debug("no streams are looked for while Redis is away: %s", error)
            await asyncio.sleep(max(_LOOK_S, _LOOKING_SHARE * (time.monotonic() - began)))

    def _scan(self, patterns: Sequence[str]) -> set[str]:
        return {name for pattern in patterns for name in self._client.scan_streams(pattern)}


def _from_their_beginning(names: Sequence[str]) -> Mapping[str, str]:
    return dict.fromkeys(names, BEGINNING)
