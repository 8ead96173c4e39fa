"""DeadLetterAlerts: calls a webhook or runs a command when messages are dead-lettered, without blocking the caller."""

import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from millstream.clock import SYSTEM_CLOCK, Clock, Every
from millstream.errors import ConfigError

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

_HEADERS = {"Content-Type": "application/json"}
_RETRY_WAITS_S = (0.0, 0.5, 1.0)
_MAX_KINDS = 100
_LOG_INTERVAL_MS = 60_000.0


class DeadLetterAlerts:
    """Sends alerts to a webhook, a command or both, from its own thread.

    * `url`: a JSON object is POSTed there, in at most three attempts
    * `command`: run without a shell, with the same JSON on its standard input; one attempt
    * `timeout_s`: timeout of each attempt, in seconds
    * `min_interval_s`: minimum time between two alerts, in seconds; events in between are summed up

    The object is `{"events": n, "summaries": [...]}`: the number of events since the last alert, and their summaries.
    Summaries that differ only in numbers are added up to one. Failures are logged at most once a minute, without the
    URL's path, which is often a secret. Without `url` and `command` it does nothing. Raises ConfigError for an invalid
    URL or command.
    """

    def __init__(
        self,
        url: str | None = None,
        command: str | None = None,
        *,
        timeout_s: float = 10.0,
        min_interval_s: float = 5.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._senders: list[Callable[[str], None]] = []
        if url:
            self._url = _checked(url)
            self._senders.append(self._post)
        if command:
            self._command = _split(command)
            self._senders.append(self._run_command)
        self._timeout_s = timeout_s
        self._min_interval_s = min_interval_s
        self._clock = clock
        self._log_interval = Every(_LOG_INTERVAL_MS)
        self._changed = threading.Condition()
        self._pending = _Pending()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, summary: Mapping[str, Any]) -> None:
        """Add `summary` to the next alert. Returns at once and never fails; does nothing after `close`."""
        if not self._senders or self._closing.is_set():
            return
        with self._changed:
            self._pending.add(summary)
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_loop, name="millstream-alerts", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout_ms: float = 5_000.0) -> None:
        """Send what is pending, for at most `timeout_ms` milliseconds, and stop the thread."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
        if self._thread is None:
            return
        self._thread.join(timeout_ms / 1000)
        process = self._process
        if self._thread.is_alive() and process is not None:
            _kill(process)

    # On the thread

    def _send_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending.events or self._closing.is_set())
                pending, self._pending = self._pending, _Pending()
            if not pending.events:
                return
            text = pending.as_json()
            for send in self._senders:
                send(text)
            self._closing.wait(self._min_interval_s)

    def _post(self, text: str) -> None:
        import httpx  # slow, and most processes send no alerts

        problem = ""
        for wait_s in _RETRY_WAITS_S:
            # No wait once closing: the remaining attempts are made at once.
            self._closing.wait(wait_s)
            try:
                answer = httpx.post(self._url, content=text, headers=_HEADERS, timeout=self._timeout_s)
            except (httpx.HTTPError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.is_success:
                return
            problem = f"it answers {answer.status_code}"
            if answer.status_code < 500 and answer.status_code != 429:
                break
        self._log_failure("cannot call the dead-letter webhook at %s: %s", self._url.host, problem)

    def _run_command(self, text: str) -> None:
        name = self._command[0]
        try:
            self._process = process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._log_failure("cannot run the dead-letter command %s: %s", name, error.strerror)
            return
        try:
            _, errors = process.communicate(text.encode(), self._timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            self._log_failure("the dead-letter command %s was killed: it took longer than %s s", name, self._timeout_s)
            return
        finally:
            self._process = None
        if process.returncode:
            tail = errors.decode("utf-8", "replace").strip()[-200:]
            self._log_failure("the dead-letter command %s failed with exit code %s: %s", name, process.returncode, tail)

    def _log_failure(self, message: str, *args: Any) -> None:
        if self._log_interval.is_due(self._clock.monotonic_ms()):
            logger.warning(message, *args)


class _Pending:
    """The summaries of the next alert. Beyond 100 kinds, only their number is kept."""

    def __init__(self) -> None:
        self.events = 0
        self._omitted = 0
        self._by_kind: dict[str, dict[str, Any]] = {}

    def add(self, summary: Mapping[str, Any]) -> None:
        self.events += 1
        numbers = {name: value for name, value in summary.items() if type(value) in (int, float)}
        words = {name: value for name, value in summary.items() if name not in numbers}
        kind = json.dumps(words, sort_keys=True, default=str)
        known = self._by_kind.get(kind)
        if known is not None:
            for name, number in numbers.items():
                known[name] = known.get(name, 0) + number
        elif len(self._by_kind) < _MAX_KINDS:
            self._by_kind[kind] = {**json.loads(kind), **numbers}
        else:
            self._omitted += 1

    def as_json(self) -> str:
        omitted = {"omitted": self._omitted} if self._omitted else {}
        return json.dumps({"events": self.events, "summaries": list(self._by_kind.values()), **omitted})


def _checked(url: str) -> "httpx.URL":
    import httpx

    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        # The text does not quote the URL, which may hold a secret.
        raise ConfigError("the dead-letter webhook's URL is invalid: write it as https://host/path") from error
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ConfigError("the dead-letter webhook's URL must be an http:// or https:// address with a host")
    return parts


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"cannot split the dead-letter command {command!r} into words: {error}") from error
    if not words:
        raise ConfigError("the dead-letter command is empty: name a program")
    return words


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
