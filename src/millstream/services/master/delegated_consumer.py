"""DelegatedConsumer: reads the messages a master assigned to it, runs a function on each, and reports the result.

It is optional: any language can do the same with Redis and HTTP.
"""

import asyncio
import inspect
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from millstream.clock import SYSTEM_CLOCK, Backoff, Clock
from millstream.errors import ConfigError, GroupMissing, RedisError, Reject, Unavailable, text_of
from millstream.model import Message
from millstream.redis_client.client import Client
from millstream.redis_client.scripts import Script
from millstream.services.master.master_client import MasterClient, MasterResponse, sibling_url
from millstream.services.master.settings import MAX_ERROR_CHARS

logger = logging.getLogger(__name__)

ACK_OWNED = Script("groups/ack_owned")

Function = Callable[[Message], Any]

_NAME_IN_USE_S = 60.0
_REPORT_FOR_S = 15.0
_HEARTBEAT_S = 5.0
_RETRY_WAIT_S = 0.5
_RERUN_WAITS_MS = (1_000.0, 60_000.0)


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings:
    """The settings of one consumer.

    * `url`, `ticket_stream`, `group`, `consumer`: its Redis, stream and group, and its name in the group
    * `register_urls`, `acknowledge_urls`: of one master or several
    * `health_url`: the URL of its `/api/health`, as masters reach it
    * `key`: the field that messages are ordered by
    * `max_tickets`: messages that it processes at once
    * `poll_ms`: wait between two reads, in milliseconds
    * `time_limit_ms`: a run that takes longer, in milliseconds, makes the consumer unhealthy
    """

    url: str = field(repr=False)
    ticket_stream: str
    group: str
    consumer: str
    register_urls: Sequence[str]
    acknowledge_urls: Sequence[str]
    health_url: str
    token: str = field(default="", repr=False)
    key: str = "ticket_id"
    max_tickets: int = 1
    poll_ms: int = 50
    time_limit_ms: float = 300_000.0

    def __post_init__(self) -> None:
        for name in ("ticket_stream", "group", "consumer", "register_urls", "acknowledge_urls"):
            if not getattr(self, name):
                raise ConfigError(f"a consumer needs {name.replace('_urls', '_api_url')}")


class RunRegister:
    """The runs in progress and those that have just ended. Threads share it."""

    def __init__(self) -> None:
        self.started_ms: dict[bytes, float] = {}
        self._ended_ms: dict[bytes, float] = {}
        self._unreported: dict[bytes, tuple[Backoff, float]] = {}
        self._lock = threading.Lock()

    def begin(self, entry_id: bytes, *, read_ms: float, now_ms: float) -> bool:
        """Start a run of an entry read at `read_ms`.

        False if it was running then, as it may be done by now, and during the wait after a result that was not
        reported.
        """
        with self._lock:
            if entry_id in self.started_ms or self._ended_ms.get(entry_id, -1.0) >= read_ms:
                return False
            if entry_id in self._unreported and now_ms < self._unreported[entry_id][1]:
                return False
            self._ended_ms = {one: ended_ms for one, ended_ms in self._ended_ms.items() if ended_ms >= read_ms}
            self.started_ms[entry_id] = now_ms
            return True

    def end(self, entry_id: bytes, now_ms: float) -> None:
        """End a run whose result has been reported."""
        with self._lock:
            self._end(entry_id, now_ms)
            self._unreported.pop(entry_id, None)

    def end_unreported(self, entry_id: bytes, now_ms: float) -> float:
        """End a run whose result was not reported. Return the wait before the next one, in milliseconds."""
        with self._lock:
            self._end(entry_id, now_ms)
            # An entry whose wait ended this long ago and that has not run since is another consumer's by now.
            forget_ms = now_ms - _RERUN_WAITS_MS[1]
            self._unreported = {one: found for one, found in self._unreported.items() if found[1] >= forget_ms}
            backoff, _ = self._unreported.get(entry_id) or (Backoff(*_RERUN_WAITS_MS), 0.0)
            wait_ms = backoff.next_ms()
            self._unreported[entry_id] = (backoff, now_ms + wait_ms)
            return wait_ms

    def _end(self, entry_id: bytes, now_ms: float) -> None:
        self.started_ms.pop(entry_id, None)
        self._ended_ms[entry_id] = now_ms


class DelegatedConsumer:
    """Runs `function` on the messages that masters assign to it. Call `run` once; `stopping` ends it."""

    def __init__(
        self, function: Function, settings: ConsumerSettings, stopping: threading.Event, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._function = function
        self._settings = settings
        self._stopping = stopping
        self._clock = clock
        self._client = Client(settings.url, clock=clock)
        self._masters = MasterClient(settings.token, stopping)
        self._instance = secrets.token_hex(8)
        self._running = RunRegister()
        self._wakeup = threading.Event()
        self._failures: list[RedisError] = []

    def run(self, *, stop_s: float = 25.0) -> None:
        """Register, and process messages until `stopping` is set; runs in progress then have `stop_s` seconds to end.

        Raises ConfigError and RedisError.
        """
        pool = ThreadPoolExecutor(self._settings.max_tickets, "millstream-consumer")
        try:
            if self._register():
                self._read_loop(pool)
        finally:
            end_ms = self._clock.monotonic_ms() + stop_s * 1000
            while self._running.started_ms and self._clock.monotonic_ms() < end_ms:
                self._clock.sleep_ms(10)
            pool.shutdown(wait=False, cancel_futures=True)
            self._unregister()
            self._masters.close()
            self._client.close()
        if self._failures:
            raise self._failures[0]

    def overdue(self) -> list[str]:
        """Ids of the messages whose run exceeds the time limit."""
        now_ms = self._clock.monotonic_ms()
        runs = dict(self._running.started_ms)
        return [one.decode() for one, since_ms in runs.items() if now_ms - since_ms > self._settings.time_limit_ms]

    # Calls to masters

    def _register(self) -> bool:
        settings = self._settings
        body = {
            "consumer": settings.consumer,
            "health_url": settings.health_url,
            "max_tickets": settings.max_tickets,
            "instance": self._instance,
        }
        since_ms = self._clock.monotonic_ms()
        while not self._stopping.is_set():
            answer = self._masters.post(settings.register_urls, body, for_s=10.0)
            if isinstance(answer, MasterResponse) and answer.ok:
                return True
            problem = answer if isinstance(answer, str) else answer.body.get("error", answer.status)
            # The consumer that has the name may have died a moment ago: a master detects that soon.
            is_in_use = isinstance(answer, MasterResponse) and answer.status == 409
            if isinstance(answer, MasterResponse) and not (
                is_in_use and self._clock.monotonic_ms() - since_ms < _NAME_IN_USE_S * 1000
            ):
                raise ConfigError(f"the master refuses consumer {settings.consumer!r}: {problem}")
            logger.warning("consumer %s is not registered yet: %s; trying again", settings.consumer, problem)
            self._stopping.wait(_RETRY_WAIT_S)
        return False

    def _heartbeat(self) -> None:
        urls = [sibling_url(url, "heartbeat") for url in self._settings.register_urls]
        answer = self._masters.post(urls, {"consumer": self._settings.consumer}, for_s=0.0)
        if isinstance(answer, MasterResponse) and answer.status == 404:
            logger.warning("consumer %s is unknown to the master; registering again", self._settings.consumer)
            self._register()

    def _report(self, outcome: str, entry_id: bytes, **more: object) -> str:
        """Report a message's outcome to a master. Return why none accepted it, or an empty text."""
        urls = [sibling_url(url, outcome) for url in self._settings.acknowledge_urls]
        body = {"consumer": self._settings.consumer, "message_id": entry_id.decode(), **more}
        answer = self._masters.post(urls, body, for_s=_REPORT_FOR_S)
        if isinstance(answer, str):
            return f"no master accepted {outcome}: {answer}"
        return "" if answer.ok else f"a master refused {outcome}: {answer.body.get('error', answer.status)}"

    def _unregister(self) -> None:
        urls = [sibling_url(url, "release") for url in self._settings.acknowledge_urls]
        self._masters.post(urls, {"consumer": self._settings.consumer}, for_s=0.0)

    # Messages

    def _read_loop(self, pool: ThreadPoolExecutor) -> None:
        settings = self._settings
        read = ("XREADGROUP", "GROUP", settings.group, settings.consumer, "COUNT", settings.max_tickets, "STREAMS")
        heartbeat_ms = self._clock.monotonic_ms()
        while not self._stopping.is_set():
            read_ms = self._clock.monotonic_ms()
            self._wakeup.clear()
            try:
                found = self._client.execute(*read, settings.ticket_stream, "0")
            except (Unavailable, GroupMissing) as error:
                logger.warning("consumer %s cannot read: %s; retrying", settings.consumer, error)
                self._stopping.wait(_RETRY_WAIT_S)
                continue
            for entry_id, pairs in found[0][1] if found else ():
                if self._running.begin(entry_id, read_ms=read_ms, now_ms=self._clock.monotonic_ms()):
                    pool.submit(self._process, entry_id, pairs)
            if self._clock.monotonic_ms() - heartbeat_ms > _HEARTBEAT_S * 1000:
                heartbeat_ms = self._clock.monotonic_ms()
                self._heartbeat()
            self._wakeup.wait(settings.poll_ms / 1000)

    def _process(self, entry_id: bytes, pairs: Sequence[bytes] | None) -> None:
        problem, unexpected = "", None
        try:
            problem = self._run_and_report(entry_id, pairs)
        except RedisError as error:  # Unavailable: only when the consumer stops; `_acknowledge` tries again until then
            if not isinstance(error, Unavailable):
                self._failures.append(error)
                self._stopping.set()
        except BaseException as error:  # noqa: BLE001 - the pool would swallow it, and the message run again at once
            problem, unexpected = f"unexpected error: {type(error).__name__}: {_reported(error)}", error
        finally:
            self._end(entry_id, problem, unexpected)
            self._wakeup.set()

    def _end(self, entry_id: bytes, problem: str, unexpected: BaseException | None) -> None:
        now_ms = self._clock.monotonic_ms()
        if not problem:
            self._running.end(entry_id, now_ms)
            return
        wait_ms = self._running.end_unreported(entry_id, now_ms)
        logger.warning(
            "the result of message %s is not reported: %s; if it stays assigned, it runs again after %g s",
            entry_id.decode(),
            problem,
            wait_ms / 1000,
            exc_info=unexpected,
        )

    def _run_and_report(self, entry_id: bytes, pairs: Sequence[bytes] | None) -> str:
        """Run the function and report its result. Return why a failure was not reported, or an empty text."""
        if pairs is None:
            logger.warning("message %s is lost: it was trimmed before it was processed", entry_id.decode())
        elif (failure := self._call_function(entry_id, pairs)) is not None:
            return self._report("fail", entry_id, error=_reported(failure), retry=not isinstance(failure, Reject))
        if not self._acknowledge(entry_id):
            logger.warning(
                "message %s was reassigned during its run: another consumer processes it again", entry_id.decode()
            )
        elif problem := self._report("acknowledge", entry_id):
            logger.warning(
                "message %s is done, but not reported: %s; masters detect its XACK", entry_id.decode(), problem
            )
        return ""

    def _call_function(self, entry_id: bytes, pairs: Sequence[bytes]) -> BaseException | None:
        message = Message(self._settings.ticket_stream, entry_id.decode(), pairs)
        message.key = message.fields.get(self._settings.key)
        try:
            result = self._function(message)
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except BaseException as error:  # noqa: BLE001 - a function may raise anything; it is reported to the master
            logger.warning("message %s failed: %s: %s", message.id, type(error).__name__, _reported(error))
            return error
        return None

    def _acknowledge(self, entry_id: bytes) -> bool:
        settings = self._settings
        return bool(
            self._client.retry_while_unavailable(
                lambda: self._client.script(
                    ACK_OWNED, (settings.ticket_stream,), (settings.group, settings.consumer, entry_id)
                ),
                what=settings.consumer,
                give_up=self._stopping.is_set,
            )
        )


async def _awaited(result: Any) -> None:
    await result


def _reported(failure: BaseException) -> str:
    """The text of a failure as masters accept it: in UTF-8, and no longer than they allow."""
    text = text_of(failure)[:MAX_ERROR_CHARS]
    return text.encode("utf-8", "backslashreplace").decode()[:MAX_ERROR_CHARS]
