"""A web server that receives the alerts of a test."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Webhook:
    """A web server that notes what is POSTed to it, and answers with `statuses`, then with 200."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    delay_s: float = 0.0
    received: list[dict[str, Any]] = field(default_factory=list)
    at: list[float] = field(default_factory=list)


@contextmanager
def webhook(*statuses: int, delay_s: float = 0.0) -> Iterator[Webhook]:
    """A webhook on a free port."""
    hook = Webhook(statuses=list(statuses), delay_s=delay_s)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hook.at.append(time.monotonic())
            time.sleep(hook.delay_s)
            status = hook.statuses.pop(0) if hook.statuses else 200
            if status == 200:
                assert self.headers["Content-Type"] == "application/json"
                hook.received.append(json.loads(body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hook.url = f"http://127.0.0.1:{server.server_port}/secret?token=secret"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hook
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
