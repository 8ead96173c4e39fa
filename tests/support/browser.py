"""A real browser for tests: headless Chromium, driven over its DevTools protocol."""

import json
import shutil
import subprocess
from itertools import count
from pathlib import Path
from typing import Any, Self

import httpx
from websockets.sync.client import connect

from tests.support.processes import kill_with_descendants
from tests.support.requirements import skip_without
from tests.support.waiting import FAIL_SAFE_S, eventually

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)


def _program() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    skip_without(found, "there is no browser: apt-get install chromium")
    assert found
    return found


class Browser:
    """A browser that shows one page. A context manager that kills it at the end. Requires Chromium."""

    def __init__(self, url: str, profile: Path) -> None:
        self._url = url
        self._profile = profile
        self._numbers = count(1)

    def __enter__(self) -> Self:
        command = [_program(), *_FLAGS, f"--user-data-dir={self._profile}", self._url]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = self._port()
        pages = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=FAIL_SAFE_S, trust_env=False).json()
        address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        self._opening = connect(address, proxy=None, open_timeout=FAIL_SAFE_S, close_timeout=1)
        self._socket = self._opening.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._opening.__exit__(None, None, None)
        kill_with_descendants(self._process)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page; None if another page replaces it meanwhile."""
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "error" in answer:
            assert answer["error"]["code"] == -32_000, answer  # the page is being replaced
            return None
        assert "exceptionDetails" not in answer["result"], answer["result"]
        return answer["result"]["result"].get("value")

    def command(self, method: str, **parameters: Any) -> Any:
        """The answer to a command of the DevTools protocol."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(FAIL_SAFE_S))
            if answer.get("id") == number:
                return answer

    def show(self, *, width: int, dark: bool) -> None:
        """Give the window this width, in pixels, and let the user prefer dark or light colours."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def _port(self) -> int:
        file = self._profile / "DevToolsActivePort"
        lines = eventually(lambda: file.exists() and file.read_text().splitlines(), "the browser to start")
        assert lines
        return int(lines[0])
