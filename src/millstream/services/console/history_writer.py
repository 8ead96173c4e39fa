"""HistoryWriter: collects the figures of all handlers, and adds them to the history, in one console at a time."""

import logging
import secrets
import threading
from typing import Self

from millstream.admin.figure_history import FigureHistory, sample_of
from millstream.admin.handler_sweep import HandlerSweep, SweepPolicy
from millstream.clock import SYSTEM_CLOCK
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import history_writer_key
from millstream.redis_client.pipelining import server_time_ms
from millstream.worker.static_membership import HOLD_NAME

logger = logging.getLogger(__name__)

MOST_PER_S = 500
_REST = 4
"""How many times as long as it read the sweep rests, at least."""
_POLL_S = 10.0
_HELD_MS = 45_000
_TIMEOUT_MS = 10_000
_STOP_S = 5.0


class HistoryWriter:
    """One of any number of processes that may write the history; the one that holds the name collects and writes.

    It reads at most 500 handlers on streams a second, for at most a fifth of the time. A context manager: a thread writes
    in the block, and the name is free after it.
    """

    def __init__(self, url: str, policy: SweepPolicy | None = None) -> None:
        self._client = Client(url, timeout_ms=_TIMEOUT_MS)
        self._policy = policy
        self._sweep = HandlerSweep(self._client, policy)
        self._is_behind = False
        self._token = secrets.token_hex(8)
        self._stopping = threading.Event()
        self._deadline_ms = 0.0
        self._thread = threading.Thread(target=self._run, name="millstream-history", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, within five seconds from now, or from `begin_stop`."""
        self.begin_stop()
        self._thread.join(max(0.0, self._deadline_ms - SYSTEM_CLOCK.monotonic_ms()) / 1_000)

    def begin_stop(self) -> None:
        """Let the thread end. Returns at once."""
        if not self._stopping.is_set():
            self._deadline_ms = SYSTEM_CLOCK.monotonic_ms() + _STOP_S * 1_000
            self._stopping.set()

    def write(self) -> bool:
        """If this process holds the name, or can get it, and a sample is due, collect for ten seconds, or until all is
        read, and add the sample once every handler was read on each of its streams. Return whether it did.

        Raises RedisError.
        """
        if not self._hold_for(_HELD_MS):
            self._sweep.close()
            self._sweep, self._is_behind = HandlerSweep(self._client, self._policy), False
            return False
        self._sweep.begin()
        history = FigureHistory(self._client)
        is_due = history.is_due(server_time_ms(self._client))
        if is_due or self._is_behind or not self._sweep.is_complete:
            self._collect()
            self._is_behind = self._sweep.is_waiting
        if not is_due or not self._sweep.is_complete:
            return False
        return history.add(sample_of(self._sweep, server_time_ms(self._client)))

    def _collect(self) -> None:
        end_ms = SYSTEM_CLOCK.monotonic_ms() + _POLL_S * 1_000
        while self._sweep.is_waiting and not self._stopping.is_set():
            began_ms = SYSTEM_CLOCK.monotonic_ms()
            count = self._sweep.step()
            took_ms = SYSTEM_CLOCK.monotonic_ms() - began_ms
            if began_ms + took_ms >= end_ms:
                return
            self._stopping.wait(max(_REST * took_ms, count * 1_000 / MOST_PER_S - took_ms) / 1_000)

    def release(self) -> None:
        """Release the name, so that another console may write at once. Raises RedisError."""
        self._hold_for(0)

    def _hold_for(self, held_ms: int) -> bool:
        return bool(self._client.script(HOLD_NAME, (history_writer_key(),), (self._token, held_ms)))

    def _run(self) -> None:
        failed = False
        while not self._stopping.is_set():
            try:
                self.write()
                failed = False
            except RedisError as error:
                if not failed:
                    logger.warning("history not written: %s; retrying every %.0f s", error, _POLL_S)
                failed = True
            if failed or not self._is_behind:
                self._stopping.wait(_POLL_S)
        try:
            self.release()
        except RedisError as error:
            logger.info("history not released: %s; another console writes within %.0f s", error, _HELD_MS / 1_000)
        self._sweep.close()
        self._client.close()
