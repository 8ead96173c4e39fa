"""RouterRole: which worker enqueues the entries of a stream that several workers share."""

import contextlib
import math
import secrets
from collections.abc import Collection

from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.worker.context import WorkerContext
from millstream.worker.static_membership import HOLD_NAME

ROLE_MS = 3_000
"""How long the role lasts after its last renewal, in milliseconds."""
_ROLE_MS_EACH = 15.0


class RouterRole:
    """The role of router, which one worker at a time has on each stream, so that the others need not read all entries.

    The worker keeps the role by renewing it; after three seconds without renewal, or 15 ms for each stream if those are
    thousands, another worker acquires it. Correctness does not depend on there being one router only. Used by one
    thread.

    `client`: a connection for routing
    """

    def __init__(self, context: WorkerContext, client: Client) -> None:
        self._context = context
        self._client = client
        self._token = secrets.token_hex(8)
        self._due_ms = 0.0
        self._requested: set[str] = set()
        self.held: set[str] = set()
        """The streams on which this worker is the router, as far as it knows; each change makes a new set."""

    def acquire(self, names: Collection[str]) -> None:
        """Acquire or renew the role: on new streams at once, on all of them every second. Raises RedisError."""
        now_ms = self._context.clock.monotonic_ms()
        held_ms = max(ROLE_MS, math.ceil(_ROLE_MS_EACH * len(names)))
        if now_ms >= self._due_ms:
            self._due_ms = now_ms + held_ms / 3
            self._requested.clear()
        new = [name for name in names if name not in self._requested]
        if not new:
            return
        held = self._client.scripts(
            [(HOLD_NAME, (self._context.keys_of(name).router,), (self._token, held_ms)) for name in new]
        )
        if not self._requested:
            self.held = set()
        self._requested.update(new)
        self.held = self.held | {name for name, is_held in zip(new, held, strict=True) if is_held}

    def make_due(self) -> None:
        """Renew the role on all streams with the next `acquire`."""
        self._due_ms = 0.0

    def release(self) -> None:
        """Release the role, so that other workers may acquire it at once; while Redis is unavailable it expires."""
        with contextlib.suppress(Unavailable):
            self._client.scripts(
                [(HOLD_NAME, (self._context.keys_of(name).router,), (self._token, 0)) for name in self.held]
            )
