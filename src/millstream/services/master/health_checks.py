"""Calls the health URLs of the registered consumers, and says in the registry what came of it."""

import asyncio
import errno
import ipaddress
import logging
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, NamedTuple
from weakref import WeakValueDictionary

import httpx

from millstream.errors import RedisError
from millstream.services.master.health_url_allowlist import Address, AllowList, Target, literal_address
from millstream.services.master.loop_delay import LoopDelay
from millstream.services.master.registry import Registration, Registry
from millstream.services.master.settings import MasterSettings
from millstream.services.web.errors import Refused

logger = logging.getLogger(__name__)

_LONGEST_S, _LONGEST_CONNECT_S = 3.0, 1.0
_AT_ONCE_AT_ONE_PLACE = 16
_LOOKUPS_AT_ONCE = 32
_ON_TIME = 0.25
"""A master was on time if it was late by less than this part of the time that it had."""

_OWN_TROUBLES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Life = tuple[str, str]
"""A consumer's name, and which life of it."""

Place = tuple[str, int]
"""Host and port of a health URL."""


class Ping(NamedTuple):
    """What came of a ping.

    * `problem`: what is wrong; None if nothing is
    * `by`: how that is known: by an "answer" or a refusal; by "silence", which may be this master's not listening; or not
      at all, as it is trouble of the master's "own"
    """

    problem: str | None
    by: Literal["answer", "silence", "own"] = "answer"


class HealthChecker:
    """Finds out which consumers are healthy. `on_death` is called after one was found dead.

    A health URL is asked without redirects, proxies or cookies, at an address that was looked up once and judged; all that
    counts is that the status is one of 2xx, so nothing of the body is read. Each consumer is asked when its own time has
    come: one that answers late, or never, holds up none but those at the same host and port. A ping counts as missed only if
    this master was on time itself.
    """

    def __init__(
        self, registry: Registry, settings: MasterSettings, allowed: AllowList, *, on_death: Callable[[], None]
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._allowed = allowed
        self._on_death = on_death
        self._interval_s = settings.ping_ms / 1000
        self._timeout_s = min(_LONGEST_S, self._interval_s)
        self._lateness = LoopDelay()
        self._failures: dict[Life, int] = {}
        self._due_s: dict[Life, float] = {}
        self._under_way: set[Life] = set()
        self._late_s: dict[Life, float] = {}
        self._places: WeakValueDictionary[Place, asyncio.Semaphore] = WeakValueDictionary()
        # Names that nobody answers for keep threads for long: those of the event loop are for other things.
        self._lookups = ThreadPoolExecutor(_LOOKUPS_AT_ONCE, "millstream-lookup")

    async def run(self) -> None:
        """Ping everyone, again and again, until cancelled."""
        try:
            async with open_transport() as transport, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lateness.run())
                while True:
                    try:
                        consumers = await asyncio.to_thread(self._registry.all)
                    except RedisError as error:
                        logger.warning("the consumers cannot be looked up: %s", error)
                        self._failures.clear()  # no master could take a heartbeat meanwhile, or note one
                    else:
                        self._begin_due(consumers, transport, tasks)
                    await asyncio.sleep(min(1.0, self._interval_s / 5))
        finally:
            self._lookups.shutdown(wait=False, cancel_futures=True)

    def _begin_due(
        self, consumers: Mapping[str, Registration], transport: httpx.AsyncBaseTransport, tasks: asyncio.TaskGroup
    ) -> None:
        now_s = asyncio.get_running_loop().time()
        lives = {(name, found.incarnation): found for name, found in consumers.items()}
        self._failures = {life: count for life, count in self._failures.items() if life in lives}
        self._due_s = {life: due_s for life, due_s in self._due_s.items() if life in lives}
        self._late_s = {life: late_s for life, late_s in self._late_s.items() if life in lives}
        for life, found in lives.items():
            if life not in self._under_way and self._due_s.get(life, now_s) <= now_s:
                # Not all at the same time for ever, where all were found at the same time.
                self._due_s[life] = now_s + self._interval_s * random.uniform(0.9, 1.0)
                self._under_way.add(life)
                tasks.create_task(self._look(life, found, transport))

    async def _look(self, life: Life, found: Registration, transport: httpx.AsyncBaseTransport) -> None:
        try:
            late_s = self._lateness.so_far_s()
            if found.health_url is None:
                # It may have sent one that this master was too late to take since it last looked.
                late_s = self._late_s.get(life, late_s)
                found_out = Ping("it sent no heartbeat", "silence")
            else:
                found_out = await self._ping(transport, found.health_url)
            self._late_s[life] = self._lateness.so_far_s()
            was_late = self._late_s[life] - late_s > _ON_TIME * self._timeout_s
            if found_out.by == "own":
                logger.warning("consumer %s cannot be pinged for now: %s", life[0], found_out.problem)
            elif found_out.by == "answer" or not was_late:
                await asyncio.to_thread(self._judge, life, found_out.problem)
            elif found.health_url is None:
                self._failures.pop(life, None)
        except RedisError as error:
            logger.warning("what became of a ping cannot be noted: %s", error)
        finally:
            self._under_way.discard(life)

    async def _ping(self, transport: httpx.AsyncBaseTransport, url: str) -> Ping:
        try:
            target = self._allowed.target(url)
        except Refused as error:  # by the rules of this master; another had let it in
            return Ping(str(error))
        turns = self._places.setdefault((target.host, target.port), asyncio.Semaphore(_AT_ONCE_AT_ONE_PLACE))
        async with turns:
            return await self.ping(transport, target)

    async def ping(self, transport: httpx.AsyncBaseTransport, target: Target, timeout_s: float | None = None) -> Ping:
        """Ask at a health URL, for `timeout_s` seconds at most, or as long as the settings say."""
        within_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(within_s):
                address = await self._resolve(target)
                response = await transport.handle_async_request(_request(target, address, within_s))
                await response.aclose()
        except (TimeoutError, httpx.TimeoutException):
            return Ping("no answer in time", "silence")
        except (Refused, httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return Ping(str(error) or type(error).__name__, "own" if _is_own_trouble(error) else "answer")
        return Ping(None if response.is_success else f"status {response.status_code}")

    async def _resolve(self, target: Target) -> Address:
        """The first address of a host, if it may be called. Raises Refused and OSError."""
        for address in await self._addresses(target):
            if self._allowed.permits(target, address):
                return address
        raise Refused(403, f"no address of {target.host} is allowed with port {target.port}")

    async def _addresses(self, target: Target) -> Sequence[Address]:
        literal = literal_address(target.host)
        if literal is not None:
            return (literal,)
        found = await asyncio.get_running_loop().run_in_executor(
            self._lookups, partial(socket.getaddrinfo, target.host, target.port, type=socket.SOCK_STREAM)
        )
        return [ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found]

    def _judge(self, life: Life, problem: str | None) -> None:
        name, incarnation = life
        if problem is None:
            self._failures.pop(life, None)
            self._registry.healthy(name, incarnation, every_ms=self._settings.ping_ms // 2)
            return
        # Silence counts only as far as this master has listened: the registry may be older than this process.
        self._failures[life] = self._failures.get(life, 0) + 1
        silent_ms = self._settings.silent_ms - self._settings.ping_ms // 2
        if self._failures[life] < self._settings.ping_failures:
            return
        if self._registry.silent(name, incarnation, silent_ms=silent_ms):
            logger.warning("consumer %s is dead (%s): its messages go to others", name, problem)
            self._on_death()

    @property
    def failures(self) -> Mapping[Life, int]:
        """How many times in a row each life of a consumer was found ill."""
        return self._failures


def open_transport() -> httpx.AsyncHTTPTransport:
    """What pings go out on: a connection for each. Unlike a client of httpx it follows and remembers nothing."""
    return httpx.AsyncHTTPTransport(
        trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
    )


def _request(target: Target, address: Address, within_s: float) -> httpx.Request:
    host = f"[{address}]" if address.version == 6 else str(address)
    named = f"[{target.host}]" if ":" in target.host else target.host
    timeout = httpx.Timeout(within_s, connect=min(within_s, _LONGEST_CONNECT_S))
    return httpx.Request(
        "GET",
        f"{target.scheme}://{host}:{target.port}{target.path}",
        headers={"Host": f"{named}:{target.port}", "User-Agent": "millstream-master", "Connection": "close"},
        extensions={"sni_hostname": target.host, "timeout": timeout.as_dict()},
    )


def _is_own_trouble(error: BaseException) -> bool:
    """Whether this process has no files or memory left for a connection."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _OWN_TROUBLES:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
