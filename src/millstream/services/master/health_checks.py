"""HealthChecker: calls the health URLs of the registered consumers, and records the results in the registry."""

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
_CONCURRENT_PER_ENDPOINT = 16
_LOOKUP_THREADS = 32
_ON_TIME_RATIO = 0.25
"""A master was on time if its event loop was late by less than this part of the timeout."""

_LOCAL_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

ConsumerIncarnation = tuple[str, str]
"""A consumer's name and incarnation."""

Endpoint = tuple[str, int]
"""Host and port of a health URL."""


class HealthResult(NamedTuple):
    """The result of a health check.

    * `problem`: why the consumer is not healthy; None if it is
    * `evidence`: an "answer" or a refused connection; "silence", which may be the fault of a late master; or
      "own", an error of the master itself, which says nothing about the consumer
    """

    problem: str | None
    evidence: Literal["answer", "silence", "own"] = "answer"


class HealthChecker:
    """Checks which consumers are healthy. Calls `on_death` after it has declared one dead.

    It calls a health URL without redirects, proxies or cookies, at an address that it resolved once and checked. Only
    the status counts, any of 2xx; the body is not read. Each consumer has a schedule of its own: a slow or silent one
    delays only consumers at the same host and port. A check counts as missed only if this master was on time itself.
    """

    def __init__(
        self, registry: Registry, settings: MasterSettings, allowed: AllowList, *, on_death: Callable[[], None]
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._allow_list = allowed
        self._on_death = on_death
        self._interval_s = settings.ping_ms / 1000
        self._timeout_s = min(_LONGEST_S, self._interval_s)
        self._loop_delay = LoopDelay()
        self._failures: dict[ConsumerIncarnation, int] = {}
        self._due_s: dict[ConsumerIncarnation, float] = {}
        self._in_progress: set[ConsumerIncarnation] = set()
        self._last_delay_s: dict[ConsumerIncarnation, float] = {}
        self._endpoint_slots: WeakValueDictionary[Endpoint, asyncio.Semaphore] = WeakValueDictionary()
        # A lookup of a dead name blocks its thread for long: the event loop's pool must not fill with them.
        self._lookup_pool = ThreadPoolExecutor(_LOOKUP_THREADS, "millstream-lookup")

    async def run(self) -> None:
        """Check all consumers periodically until cancelled."""
        try:
            async with open_transport() as transport, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._loop_delay.run())
                while True:
                    try:
                        consumers = await asyncio.to_thread(self._registry.all)
                    except RedisError as error:
                        logger.warning("cannot read the registered consumers: %s", error)
                        self._failures.clear()  # without Redis, no master could record a heartbeat
                    else:
                        self._start_due_checks(consumers, transport, tasks)
                    await asyncio.sleep(min(1.0, self._interval_s / 5))
        finally:
            self._lookup_pool.shutdown(wait=False, cancel_futures=True)

    def _start_due_checks(
        self, consumers: Mapping[str, Registration], transport: httpx.AsyncBaseTransport, tasks: asyncio.TaskGroup
    ) -> None:
        now_s = asyncio.get_running_loop().time()
        registered = {(name, found.incarnation): found for name, found in consumers.items()}
        self._failures = {life: count for life, count in self._failures.items() if life in registered}
        self._due_s = {life: due_s for life, due_s in self._due_s.items() if life in registered}
        self._last_delay_s = {life: late_s for life, late_s in self._last_delay_s.items() if life in registered}
        for life, found in registered.items():
            if life not in self._in_progress and self._due_s.get(life, now_s) <= now_s:
                # Jitter: consumers found at the same time must not be checked at the same time for ever.
                self._due_s[life] = now_s + self._interval_s * random.uniform(0.9, 1.0)
                self._in_progress.add(life)
                tasks.create_task(self._check(life, found, transport))

    async def _check(self, life: ConsumerIncarnation, found: Registration, transport: httpx.AsyncBaseTransport) -> None:
        try:
            late_s = self._loop_delay.total_s()
            if found.health_url is None:
                # Delay since the previous check counts: this master may have been too late to receive a heartbeat.
                late_s = self._last_delay_s.get(life, late_s)
                result = HealthResult("it sent no heartbeat", "silence")
            else:
                result = await self._check_url(transport, found.health_url)
            self._last_delay_s[life] = self._loop_delay.total_s()
            was_late = self._last_delay_s[life] - late_s > _ON_TIME_RATIO * self._timeout_s
            if result.evidence == "own":
                logger.warning("cannot check the health of consumer %s: %s", life[0], result.problem)
            elif result.evidence == "answer" or not was_late:
                await asyncio.to_thread(self._record, life, result.problem)
            elif found.health_url is None:
                self._failures.pop(life, None)
        except RedisError as error:
            logger.warning("cannot record the health of consumer %s: %s", life[0], error)
        finally:
            self._in_progress.discard(life)

    async def _check_url(self, transport: httpx.AsyncBaseTransport, url: str) -> HealthResult:
        try:
            target = self._allow_list.parse(url)
        except Refused as error:  # by this master's allow list; another master had registered it
            return HealthResult(str(error))
        slots = self._endpoint_slots.setdefault((target.host, target.port), asyncio.Semaphore(_CONCURRENT_PER_ENDPOINT))
        async with slots:
            return await self.call_url(transport, target)

    async def call_url(
        self, transport: httpx.AsyncBaseTransport, target: Target, timeout_s: float | None = None
    ) -> HealthResult:
        """Call a health URL; wait at most `timeout_s` seconds, by default as long as the settings say."""
        within_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(within_s):
                address = await self._resolve(target)
                response = await transport.handle_async_request(_request(target, address, within_s))
                await response.aclose()
        except (TimeoutError, httpx.TimeoutException):
            return HealthResult("no answer in time", "silence")
        except (Refused, httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return HealthResult(str(error) or type(error).__name__, "own" if _is_local_error(error) else "answer")
        return HealthResult(None if response.is_success else f"status {response.status_code}")

    async def _resolve(self, target: Target) -> Address:
        """The first allowed address of a host. Raises Refused and OSError."""
        for address in await self._lookup(target):
            if self._allow_list.permits(target, address):
                return address
        raise Refused(403, f"no address of {target.host} is allowed with port {target.port}")

    async def _lookup(self, target: Target) -> Sequence[Address]:
        literal = literal_address(target.host)
        if literal is not None:
            return (literal,)
        found = await asyncio.get_running_loop().run_in_executor(
            self._lookup_pool, partial(socket.getaddrinfo, target.host, target.port, type=socket.SOCK_STREAM)
        )
        return [ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found]

    def _record(self, life: ConsumerIncarnation, problem: str | None) -> None:
        name, incarnation = life
        if problem is None:
            self._failures.pop(life, None)
            self._registry.record_success(name, incarnation, every_ms=self._settings.ping_ms // 2)
            return
        # Count only checks of this process: the last success in the registry may be from before it started.
        self._failures[life] = self._failures.get(life, 0) + 1
        silent_ms = self._settings.dead_after_ms - self._settings.ping_ms // 2
        if self._failures[life] < self._settings.ping_failures:
            return
        if self._registry.record_failure(name, incarnation, silent_ms=silent_ms):
            logger.warning("consumer %s is dead: %s; reassigning its messages", name, problem)
            self._on_death()

    @property
    def failures(self) -> Mapping[ConsumerIncarnation, int]:
        """Consecutive failed checks per consumer incarnation."""
        return self._failures


def open_transport() -> httpx.AsyncHTTPTransport:
    """The HTTP transport of the checks, one connection each. Unlike an httpx client it has no redirects or cookies."""
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


def _is_local_error(error: BaseException) -> bool:
    """Whether this process has no file descriptors or memory left for a connection."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _LOCAL_ERRNOS:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
