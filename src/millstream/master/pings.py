"""Calls the health URLs of the registered consumers, and says in the registry what came of it."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Mapping
from typing import TypeVar

import httpx

from millstream.errors import RedisError
from millstream.master.addresses import Address, AllowList, Target
from millstream.master.registry import Registration, Registry
from millstream.master.settings import MasterSettings
from millstream.web.refusal import Refused

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AT_ONCE = 50
_LONGEST_S = 3.0


class Pinger:
    """Finds out which consumers are healthy. `on_death` is called after one was found dead.

    A health URL is asked without redirects, proxies or cookies, at an address that was looked up once and judged; all that
    counts is that the status is one of 2xx, so nothing of the body is read.
    """

    def __init__(
        self, registry: Registry, settings: MasterSettings, allowed: AllowList, *, on_death: Callable[[], None]
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._allowed = allowed
        self._on_death = on_death
        self._failures: dict[tuple[str, str], int] = {}

    async def run(self) -> None:
        """Ping everyone, again and again, until cancelled."""
        timeout_s = min(_LONGEST_S, self._settings.ping_ms / 1000)
        limits = httpx.Limits(max_connections=_AT_ONCE, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False) as http:
            while True:
                began = asyncio.get_running_loop().time()
                try:
                    await self._round(http, timeout_s)
                except RedisError as error:
                    logger.warning("the consumers cannot be looked up: %s", error)
                took_s = asyncio.get_running_loop().time() - began
                await asyncio.sleep(max(0.05, self._settings.ping_ms / 1000 - took_s))

    async def _round(self, http: httpx.AsyncClient, timeout_s: float) -> None:
        consumers = await asyncio.to_thread(self._registry.all)
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str, found: Registration) -> None:
            if found.health_url is None:
                await asyncio.to_thread(self._judge, name, found, "it sent no heartbeat")
                return
            async with turns:
                problem = await self.problem(http, found.health_url, timeout_s)
            await asyncio.to_thread(self._judge, name, found, problem)

        known = {(name, found.incarnation) for name, found in consumers.items()}
        self._failures = {life: count for life, count in self._failures.items() if life in known}
        await asyncio.gather(*(one(name, found) for name, found in consumers.items()))

    async def problem(self, http: httpx.AsyncClient, url: str, timeout_s: float = _LONGEST_S) -> str | None:
        """What is wrong at a health URL; None if nothing is."""
        try:
            async with asyncio.timeout(timeout_s):
                target = self._allowed.target(url)
                address = await self._resolve(target)
                request = _request(http, target, address)
                response = await http.send(request, stream=True, follow_redirects=False)
                await response.aclose()
        except TimeoutError:
            return "no answer in time"
        except (Refused, httpx.HTTPError, OSError, UnicodeError) as error:
            return str(error) or type(error).__name__
        return None if response.is_success else f"status {response.status_code}"

    async def _resolve(self, target: Target) -> Address:
        """The first address of a host, if it may be called. Raises Refused and OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        for *_, place in found:
            address = ipaddress.ip_address(str(place[0]).partition("%")[0])
            if self._allowed.permits(target, address):
                return address
        raise Refused(403, f"no address of {target.host} is allowed with port {target.port}")

    def _judge(self, name: str, found: Registration, problem: str | None) -> None:
        life = name, found.incarnation
        if problem is None:
            self._failures.pop(life, None)
            self._registry.healthy(name, found.incarnation, every_ms=self._settings.ping_ms // 2)
            return
        # Silence counts only as far as this master has listened: the registry may be older than this process.
        self._failures[life] = self._failures.get(life, 0) + 1
        silent_ms = self._settings.silent_ms - self._settings.ping_ms // 2
        if self._failures[life] < self._settings.ping_failures:
            return
        if self._registry.silent(name, found.incarnation, silent_ms=silent_ms):
            logger.warning("consumer %s is dead (%s): its messages go to others", name, problem)
            self._on_death()

    @property
    def failures(self) -> Mapping[tuple[str, str], int]:
        """How many times in a row each life of a consumer was found ill."""
        return self._failures


def _request(http: httpx.AsyncClient, target: Target, address: Address) -> httpx.Request:
    host = f"[{address}]" if address.version == 6 else str(address)
    named = f"[{target.host}]" if ":" in target.host else target.host
    return http.build_request(
        "GET",
        f"{target.scheme}://{host}:{target.port}{target.path}",
        headers={"Host": f"{named}:{target.port}", "User-Agent": "millstream-master", "Connection": "close"},
        extensions={"sni_hostname": target.host},
    )
