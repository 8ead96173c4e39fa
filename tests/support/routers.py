"""Router fixtures: both readers, many subscribers in one event loop, and a check of the messages they received."""

import asyncio
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Self

from millstream.redis_client.client import Client
from millstream.router import Gap, Item, PoolPolicy, ReadPolicy, Router, Subscription
from tests.support.waiting import FAIL_SAFE_S, eventually

READERS = ("tracking", "pool")
POOL = PoolPolicy(workers=2, max_workers=4, streams=200, block_ms=50)
OFTEN = ReadPolicy(sweep_ms=300)


def make_router(url: str, reader: Any, **settings: Any) -> Router:
    """A router with a pool that fits small tests."""
    return Router(url, reader=reader, pool=POOL, **settings)


def publish(client: Client, streams: Iterable[str], numbers: Iterable[int]) -> None:
    """Add an entry with each number to each stream."""
    names = list(streams)
    client.pipeline([("XADD", name, "*", "n", number) for number in numbers for name in names])


def take_items(subscription: Subscription, count: int, timeout_ms: float = FAIL_SAFE_S * 1000) -> list[Item]:
    """The next `count` items, read synchronously."""
    found: list[Item] = []
    for _ in range(count):
        item = subscription.get(timeout_ms)
        assert item is not None, f"only {len(found)} of {count} came: {found}"
        found.append(item)
    return found


def ids(items: Iterable[Item]) -> list[str]:
    """The ids of the messages among items; "gap" for a gap."""
    return ["gap" if isinstance(item, Gap) else item.id for item in items]  # type: ignore[union-attr]


def ids_in(client: Client, stream: str) -> list[str]:
    """The ids of all entries in the stream."""
    return [entry[0].decode() for entry in client.execute("XRANGE", stream, "-", "+")]


class Subscribers:
    """A subscriber per stream, as tasks of one event loop in a thread of its own.

    `got`: the received ids, by stream.
    """

    def __init__(self, router: Router, streams: Sequence[str], **options: Any) -> None:
        self.got: dict[str, list[str]] = {name: [] for name in streams}
        self.gaps: list[Gap] = []
        self.failures: dict[str, Exception] = {}
        self._router = router
        self._options = options
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.result(FAIL_SAFE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._router.close()
        self._thread.join(FAIL_SAFE_S)
        assert not self._thread.is_alive(), "closing the router must end every subscription"

    async def _main(self) -> None:
        tasks = [asyncio.create_task(self._follow(name)) for name in self.got]
        await asyncio.sleep(0)
        self._started.set_result(None)
        await asyncio.gather(*tasks)

    async def _follow(self, stream: str) -> None:
        mine = self.got[stream]
        try:
            async for item in self._router.subscribe(stream, **self._options):
                if isinstance(item, Gap):
                    self.gaps.append(item)
                else:
                    mine.append(item.id)  # type: ignore[union-attr]
        except Exception as error:  # noqa: BLE001 - the test checks it
            self.failures[stream] = error

    @property
    def total(self) -> int:
        """Messages received."""
        return sum(map(len, self.got.values()))

    def wait_for(self, total: int) -> None:
        """Wait until so many messages were received."""
        eventually(lambda: self.total >= total, f"{total} messages", log=self._log)

    def _log(self) -> str:
        return f"{self.total} messages came; failed: {self.failures}"

    def check(self, client: Client) -> None:
        """Check that every stream was received completely, in order, without duplicates."""
        entries = client.pipeline([("XRANGE", name, "-", "+") for name in self.got])
        wanted = {name: [entry[0].decode() for entry in found] for name, found in zip(self.got, entries, strict=True)}
        eventually(
            lambda: all(len(self.got[name]) >= len(wanted[name]) for name in wanted),
            "all that was published",
            log=self._log,
        )
        wrong = [name for name in wanted if wanted[name] != self.got[name]]
        assert not wrong, f"{len(wrong)} streams differ, such as {wrong[0]}: {self.got[wrong[0]]} of {wanted[wrong[0]]}"
        assert not self.failures
