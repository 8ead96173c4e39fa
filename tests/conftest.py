"""The fixtures of the whole suite come from `millstream.testing.plugin`, installed as a pytest plugin.

With MILLSTREAM_TEST_ACL=1 what is tested runs as a user with the rights that `millstream acl` prints, and no others,
wherever the shared server is used. What a test does itself, to prepare and to look, it still does as the default user.
"""

import functools
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from millstream.client import Client
from millstream.rights import RoleName, rule
from millstream.server import EmbeddedServer

pytest_plugins = ["pytester"]


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run side by side, their processes ignore Ctrl-C, and so would the programs that tests interrupt."""
    if hasattr(config, "workerinput"):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side, a file's stay together, and so do all on Spark: two sessions are too much for two cores."""
    for item in items:
        on_spark = item.get_closest_marker("spark") is not None
        item.add_marker(pytest.mark.xdist_group("spark" if on_spark else item.location[0]))


if os.environ.get("MILLSTREAM_TEST_ACL"):
    LOGIN = "least:rights@"

    @pytest.fixture
    def millstream_url(millstream_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        """URL of the shared server, emptied for this test, for a user with least rights."""
        millstream_server.call("FLUSHALL")
        # Making a consumer ahead of its first read is for programs of one's own; no command and no engine does it.
        millstream_server.call(*rule("least", list(RoleName)).line.split(), "+xgroup|createconsumer", ">rights")
        twins: dict[str, Client] = {}
        for name in ("execute", "everywhere", "pipeline", "script", "scripts", "scan_streams"):
            monkeypatch.setattr(Client, name, _with_all_rights_in_tests(getattr(Client, name), twins))
        yield millstream_server.url.replace("://", f"://{LOGIN}")
        for twin in twins.values():
            twin.close()

    def _with_all_rights_in_tests(method: Any, twins: dict[str, Client]) -> Any:
        @functools.wraps(method)
        def call(self: Client, *args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            if not caller.startswith("tests.") or LOGIN not in self.url:
                return method(self, *args, **options)
            url = self.url.replace(LOGIN, "")
            return method(twins.setdefault(url, Client(url, timeout_ms=self.timeout_ms)), *args, **options)

        return call
