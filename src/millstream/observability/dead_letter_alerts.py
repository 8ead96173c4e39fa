"""Rings a bell, a webhook or a command, when dead letters arrive, without ever holding up the pipeline."""

import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import httpx

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError

logger = logging.getLogger(__name__)

_HEADERS = {"Content-Type": "application/json"}
_WAITS_S = (0.0, 0.5, 1.0)
_MAX_KINDS = 100
_WORD_EVERY_MS = 60_000.0


class DeadLetterAlerts:
    """Tells a webhook, a command or both what happened, from a thread of its own.

    * `url`: a JSON object is POSTed there, in at most three tries
    * `command`: run without a shell, with the same JSON on its standard input; one try
    * `timeout_s`: for each try
    * `min_interval_s`: it rings at most once in so many seconds; what comes in between is summed up

    The object is `{"rings": n, "summaries": [...]}`: how often `ring` was called since, and what with.
    Summaries that differ in nothing but numbers are added up to one. Failures are logged, at most once a
    minute, without the URL's path, which is often a secret. Without `url` and `command` it does nothing.
    Raises ConfigError for a URL or a command that cannot be one.
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
        self._means: list[Callable[[str], None]] = []
        if url:
            self._url = _checked(url)
            self._means.append(self._post)
        if command:
            self._command = _split(command)
            self._means.append(self._run)
        self._timeout_s = timeout_s
        self._min_interval_s = min_interval_s
        self._clock = clock
        self._quiet_until_ms = 0.0
        self._changed = threading.Condition()
        self._pending = _Pending()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ring(self, summary: Mapping[str, Any]) -> None:
        """Have `summary` told. Returns at once and never fails; after `close` it does nothing."""
        if not self._means or self._closing.is_set():
            return
        with self._changed:
            self._pending.add(summary)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="millstream-bell", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout_ms: float = 5_000.0) -> None:
        """Tell what is still to be told, for at most `timeout_ms` milliseconds, and end."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
        if self._thread is None:
            return
        self._thread.join(timeout_ms / 1000)
        process = self._process
        if self._thread.is_alive() and process is not None:
            _kill(process)

    # In the thread

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending.rings or self._closing.is_set())
                pending, self._pending = self._pending, _Pending()
            if not pending.rings:
                return
            text = pending.as_json()
            for ring in self._means:
                ring(text)
            self._closing.wait(self._min_interval_s)

    def _post(self, text: str) -> None:
        problem = ""
        for wait_s in _WAITS_S:
            # A closing bell does not wait: what is left is told now or never.
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
        self._complain("the webhook at %s was not told of dead letters: %s", self._url.host, problem)

    def _run(self, text: str) -> None:
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
            self._complain("the bell command %s cannot be run: %s", name, error.strerror)
            return
        try:
            _, errors = process.communicate(text.encode(), self._timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            self._complain("the bell command %s took longer than %s s and was ended", name, self._timeout_s)
            return
        finally:
            self._process = None
        if process.returncode:
            last = errors.decode("utf-8", "replace").strip()[-200:]
            self._complain("the bell command %s ended with code %s: %s", name, process.returncode, last)

    def _complain(self, message: str, *args: Any) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._quiet_until_ms:
            self._quiet_until_ms = now_ms + _WORD_EVERY_MS
            logger.warning(message, *args)


class _Pending:
    """What is to be told at the next ring, bounded: of more than a hundred kinds, only the number is kept."""

    def __init__(self) -> None:
        self.rings = 0
        self._omitted = 0
        self._by_kind: dict[str, dict[str, Any]] = {}

    def add(self, summary: Mapping[str, Any]) -> None:
        self.rings += 1
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
        return json.dumps({"rings": self.rings, "summaries": list(self._by_kind.values()), **omitted})


def _checked(url: str) -> httpx.URL:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError("the bell's URL is none: write it as https://host/path") from error  # it may hold a secret
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ConfigError("the bell's URL must be an http:// or https:// address with a host")
    return parts


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the bell command {command!r} cannot be split into words: {error}") from error
    if not words:
        raise ConfigError("the bell command is empty: name a program")
    return words


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
