"""A real browser for tests, one for those of a process: headless Chromium, driven over its DevTools protocol."""

import json
import shutil
import subprocess
from base64 import b64decode
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Self

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
    "--allow-pre-commit-input",  # else keys and clicks before the first paint of a page are dropped
)


def _program() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    skip_without(found, "there is no browser: apt-get install chromium")
    assert found
    return found


class _DevTools:
    """A connection of the DevTools protocol, to a browser or to one of its pages. A context manager that closes it."""

    def __init__(self, address: str) -> None:
        # Without pings: their thread draws random numbers while tests of other files run, which Hypothesis takes for theirs.
        self._opening = connect(
            address, proxy=None, open_timeout=FAIL_SAFE_S, close_timeout=1, ping_interval=None, max_size=None
        )
        self._numbers = count(1)

    def __enter__(self) -> Self:
        self._socket = self._opening.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._opening.__exit__(None, None, None)

    def command(self, method: str, **parameters: Any) -> Any:
        """The answer to a command."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(FAIL_SAFE_S))
            if answer.get("id") == number:
                return answer


class Chromium:
    """A running browser, for the pages of many tests. A context manager that kills it at the end. Requires Chromium."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile

    def __enter__(self) -> Self:
        command = [_program(), *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        with ExitStack() as stack:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(kill_with_descendants, process)
            port, path = self._address()
            self.address = f"ws://127.0.0.1:{port}"
            self.tools = stack.enter_context(_DevTools(self.address + path))
            self._ending = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def _address(self) -> list[str]:
        file = self._profile / "DevToolsActivePort"
        eventually(lambda: file.exists() and len(file.read_text().split()) == 2, "the browser to start")
        return file.read_text().split()


class Browser:
    """A browser that shows one page, with cookies and storage of its own. A context manager that closes it."""

    def __init__(self, url: str, chromium: Chromium) -> None:
        self._url = url
        self._chromium = chromium

    def __enter__(self) -> Self:
        tools = self._chromium.tools
        context = tools.command("Target.createBrowserContext")["result"]["browserContextId"]
        with ExitStack() as stack:
            stack.callback(tools.command, "Target.disposeBrowserContext", browserContextId=context)
            page = tools.command("Target.createTarget", url=self._url, browserContextId=context)["result"]["targetId"]
            self._tools = stack.enter_context(_DevTools(f"{self._chromium.address}/devtools/page/{page}"))
            self._ending = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

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
        return self._tools.command(method, **parameters)

    def show(self, *, width: int, dark: bool) -> None:
        """Give the window this width, in pixels, and let the user prefer dark or light colours."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """The whole page, also what is below the window, as a PNG."""
        self.command("Emulation.setScrollbarsHidden", hidden=True)
        size = self.command("Page.getLayoutMetrics")["result"]["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.command("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return b64decode(taken["result"]["data"])
