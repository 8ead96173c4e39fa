"""Downloads: responses that are read from Redis part by part, while they are sent, and recorded before and after."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from millstream.admin.audit_log import AuditLog
from millstream.errors import MillstreamError, RedisError
from millstream.redis_client.client import Client
from millstream.services.console.client_pool import ClientPool

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

_BROKEN_OFF = "broken off by its receiver"

Part = Callable[[Client], bytes | None]
"""Reads the next part; None at the end. A part is read with any client, in any thread."""


class Download(StreamingResponse):
    """A file whose parts are read when the ones before have been sent: no slow receiver keeps a client of Redis.

    * `first`: the first part; `read`: reads the next one
    * `record`: the id of its record in the audit stream; `result`: what it came to, when it ended or was broken off
    """

    def __init__(
        self,
        clients: ClientPool,
        file_name: str,
        *,
        first: bytes | None,
        read: Part,
        record: str,
        result: Callable[[], str],
    ) -> None:
        self._clients = clients
        self._first = first
        self._read = read
        self._record = record
        self._result = result
        self._has_begun = False
        self._parts = self._sent_parts()
        name = re.sub(r"[^A-Za-z0-9._-]", "_", file_name)
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        super().__init__(self._parts, headers=headers, media_type="application/x-ndjson")

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Send the parts, and record what came of it, however it ends."""
        try:
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            await self._parts.aclose()
            if not self._has_begun:  # the receiver had left before the first part was sent
                await self._record_end(_BROKEN_OFF)

    async def _sent_parts(self) -> AsyncGenerator[bytes, None]:
        self._has_begun, how = True, _BROKEN_OFF
        try:
            part = self._first
            while part is not None:
                if part:
                    yield part
                part = await self._clients.in_thread(lambda: self._with_client(self._read))
            how = "complete"
        except MillstreamError as error:
            how = f"failed: {error}"
            raise
        finally:
            await self._record_end(how)

    async def _record_end(self, how: str) -> None:
        # Shielded: what breaks off the response does not break off its record.
        await asyncio.shield(self._clients.in_thread(lambda: self._end(f"{self._result()}, {how}")))

    def _with_client(self, read: Part) -> bytes | None:
        with self._clients.client() as client:
            return read(client)

    def _end(self, result: str) -> None:
        try:
            with self._clients.client() as client:
                AuditLog(client).end(self._record, result)
        except RedisError as error:  # all was sent, or the receiver knows of the error that came before
            logger.warning("end of a download not recorded: %s; its record stays without a result: %s", error, result)
