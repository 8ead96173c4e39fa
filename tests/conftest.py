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
from xdist.scheduler import LoadFileScheduling

from millstream.client import Client
from millstream.rights import RoleName, rule
from millstream.server import EmbeddedServer

pytest_plugins = ["pytester"]

LINES = {
    "drivers": (
        "tests/faults/test_exactly_once.py", "tests/faults/test_redis_faults.py", "tests/faults/test_sink_faults.py",
        "tests/faults/test_aside_faults.py", "tests/faults/test_cluster_faults.py", "tests/faults/test_group_faults.py",
        "tests/spark/test_connect.py", "tests/spark/test_demo.py", "tests/spark/test_notebook.py",
        "tests/spark/test_run_command.py",
    ),
    "session": ("tests/contract/", "tests/spark/"),
}  # fmt: skip
"""Files whose tests use Spark, in processes of their own or in that of the tests."""


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run side by side, their processes ignore Ctrl-C, and so would the programs that tests interrupt."""
    if hasattr(config, "workerinput"):
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _FewSparks(LoadFileScheduling):  # type: ignore[misc]  # xdist has no annotations
    """Side by side, a file's tests stay together, and so do those of each of Spark's lines: two cores bear no third Spark."""

    def _split_scope(self, nodeid: str) -> str:
        lines = (line for line, files in LINES.items() if nodeid.startswith(files))
        return next(lines, None) or str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Where tests run side by side, say which do."""
    return _FewSparks(config, log) if config.getoption("dist") == "loadfile" else None


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
