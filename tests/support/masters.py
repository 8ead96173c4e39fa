"""`millstream master` as a process, and consumers that follow the memo literally, for tests."""

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx

from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.testing.invariants import check_invariants
from tests.support.fields import text_fields
from tests.support.service_process import ServiceProcess, http_client
from tests.support.waiting import eventually

TOKEN = "a-token-for-tests-0123456789"
STREAM, GROUP = "tickets", "workers"
KEYS = HandlerKeys("master", GROUP, STREAM)
QUICK = ("--ping-interval", "0.2", "--ping-failures", "2", "--min-idle", "0.5", "--retry-delay", "0.05")

PATIENT = ("--ping-failures", "100000")
"""With these options a master checks as often, but declares no consumer dead whose process gets no CPU for a while."""

Pair = tuple[str, dict[str, str]]


class Master(ServiceProcess):
    """A master as a process."""

    def __init__(
        self, url: str, *options: str, token: str | None = TOKEN, env: Mapping[str, str] | None = None
    ) -> None:
        given = ("--ticket-stream", STREAM, "--concurrency-stream-group", GROUP) if env is None else ()
        secret = () if token is None else ("--token", token)
        super().__init__(("master", *given, *secret), (*QUICK, *options), url, env=env)

    def __enter__(self) -> Self:
        super().__enter__()
        self.http = http_client(self.url, {"Authorization": f"Bearer {TOKEN}"})
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        super().__exit__()

    def post(self, path: str, **body: object) -> httpx.Response:
        """Post to the API."""
        return self.http.post(f"/api/{path}", json=body)

    def get(self, path: str, **params: str | int) -> Any:
        """The JSON answer of a GET."""
        found = self.http.get(f"/api/{path}", params=params)
        assert found.status_code == 200, found.text
        return found.json()

    def state_of(self, name: str) -> str | None:
        """The state of a consumer, as the master shows it."""
        found = {one["consumer_name"]: one["state"] for one in self.get("consumers")["consumers"]}
        return found.get(name)


class HealthPage:
    """A health URL that a test can let fail. A context manager."""

    def __init__(self) -> None:
        self.status = 200
        self.location = ""
        self.delay_s = 0.0
        self.gives_cookie = ""
        self.cookies: list[str] = []
        self.calls = 0
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page.calls += 1
                time.sleep(page.delay_s)
                page.cookies += self.headers.get_all("Cookie", [])
                self.send_response(page.status)
                if page.gives_cookie:
                    self.send_header("Set-Cookie", page.gives_cookie)
                if page.location:
                    self.send_header("Location", page.location)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/api/health"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class SilentPage:
    """A health URL that accepts every call and never answers. A context manager."""

    def __init__(self) -> None:
        self.calls = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1_000)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/api/health"
        self._thread = threading.Thread(target=self._accept)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        accepted: list[socket.socket] = []
        with suppress(OSError):  # it is closed
            while True:
                accepted.append(self._listener.accept()[0])
                self.calls += 1
        for one in accepted:
            one.close()


class MemoConsumer:
    """A consumer as in the memo: only XREADGROUP 0, XACK and two HTTP calls. A context manager."""

    def __init__(self, client: Client, name: str, **more: object) -> None:
        self.name = name
        self.health = HealthPage()
        self._client = client
        self._more = more

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.health.close()

    def register(self, master: Master) -> Self:
        """Register with the spellings of the memo."""
        found = master.post("consumers/register", consumer_name=self.name, healthURL=self.health.url, **self._more)
        assert found.status_code == 200, found.text
        return self

    def read(self) -> list[Pair]:
        """Ids and fields of the entries pending with this consumer."""
        command = ("XREADGROUP", "GROUP", GROUP, self.name, "COUNT", 100, "STREAMS", STREAM, "0")
        found = self._client.execute(*command)
        return [(one.decode(), text_fields(pairs)) for one, pairs in found[0][1]] if found else []

    def next(self) -> Pair:
        """The first assigned message; waits for it."""
        found: list[Pair] = eventually(self.read, f"a message for {self.name}")
        return found[0]

    def xack(self, message_id: str) -> int:
        """Acknowledge in Redis only."""
        return int(self._client.execute("XACK", STREAM, GROUP, message_id))

    def acknowledge(self, master: Master, message_id: str) -> httpx.Response:
        """Acknowledge at the master only."""
        return master.post("messages/acknowledge", consumer=self.name, message_id=message_id)

    def finish(self, master: Master, message_id: str) -> dict[str, Any]:
        """Acknowledge in Redis and at the master."""
        self.xack(message_id)
        found = self.acknowledge(master, message_id)
        assert found.status_code == 200, found.text
        return dict(found.json())


def publish(client: Client, *tickets: str) -> list[str]:
    """Publish one message per ticket; return the ids."""
    return [
        client.execute("XADD", STREAM, "*", "ticket_id", ticket, "n", n).decode() for n, ticket in enumerate(tickets)
    ]


def holders(client: Client) -> dict[str, str]:
    """The consumer of each pending entry, by XPENDING."""
    return {one.decode(): name.decode() for one, name, *_ in client.execute("XPENDING", STREAM, GROUP, "-", "+", 1_000)}


def is_read(client: Client) -> bool:
    """Whether all entries of the stream were delivered to the group."""
    last = client.execute("XREVRANGE", STREAM, "+", "-", "COUNT", 1)
    return bool(last) and last[0][0] in [group[7] for group in client.execute("XINFO", "GROUPS", STREAM)]


def is_clean(client: Client) -> bool:
    """Whether all is read, nothing is pending and no key queue has left state."""
    return (
        is_read(client)
        and not holders(client)
        and not check_invariants(client, KEYS, STREAM)
        and not client.execute("HLEN", KEYS.owners)
    )
