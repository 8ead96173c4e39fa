"""The fixtures of the whole suite come from `millstream.testing.plugin`, installed as a pytest plugin.

With MILLSTREAM_TEST_ACL=1 what is tested runs as a user with the rights that `millstream acl` prints, and no others,
wherever the shared server is used. What a test does itself, to prepare and to look, it still does as the default user.
"""

import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from millstream.admin.acl import RoleName, acl_rule
from millstream.redis_client.client import Client, shared_client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support import servers, waiting
from tests.support.java import start_java_quickly
from tests.support.processes_left_behind import RunGuardian
from tests.support.quick_programs import end_template

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.testing.history import Report
    from tests.support.browser import Chromium
    from tests.support.worker_processes import PrintFigures, StandstillWatch

pytest_plugins = ["pytester"]

AREAS = ("worker", "keys", "groups", "balancer", "router", "master", "spark", "sink", "cli", "chaos")
"""The systems that tests belong to, each a marker: `make test AREA=keys`. Every file of tests names its own."""

SPARK_GROUPS = ("session", "drivers")
"""Tests that share the one Spark session of their process, and tests that start Spark in other processes.

Side by side, the tests of a group run one after another in one process: two cores bear no third Spark.
"""
ORDER = ("faults", "contract", "spark", "integration", "unit")
"""What takes longest comes first, so that no process has much left when the others are done (`--no-loadscope-reorder`)."""

# No verdict by the clock: neither how long an example runs nor how long it takes to make one.
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("untimed")

IMPORT_PATH = os.environ.get("PYTHONPATH")

guardian_key = pytest.StashKey[RunGuardian]()
left_key = pytest.StashKey[list[str]]()


@pytest.fixture
def client(millstream_url: str) -> Iterator[Client]:
    """A client of the shared server, which is empty."""
    with Client(millstream_url) as opened:
        yield opened


@pytest.fixture
def clerk(client: Client) -> Iterator[Client]:
    """A client of a user that may do everything, until a test takes that away."""
    client.execute("ACL", "SETUSER", "clerk", "reset", "on", ">pw", "~*", "+@all")
    with Client(client.url.replace("redis://", "redis://clerk:pw@")) as limited:
        yield limited
    client.execute("ACL", "DELUSER", "clerk")


@pytest.fixture
def fresh_client(millstream_fresh_server: EmbeddedServer) -> Iterator[Client]:
    """A client of a server of the test's own, which it may kill and reconfigure, or whose commands it counts."""
    with Client(millstream_fresh_server.url) as opened:
        yield opened


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """One session for all tests of a process."""
    from tests.support.sessions import shared_session  # most processes of a run need no Spark

    with shared_session() as session:
        yield session


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Chromium]":
    """One browser for all tests of a process, each of which opens a page of its own."""
    from tests.support.browser import Chromium  # most processes of a run need no browser

    with Chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="session")
def quick_pythons() -> Iterator[None]:
    """Spark that tests start in processes of its own has the Python of its sources and sinks start quickly."""
    from tests.support.spark_pythons import quick_spark_pythons  # most processes of a run need no Spark

    with quick_spark_pythons():
        yield


@pytest.fixture(autouse=True)
def own_import_path() -> Iterator[None]:
    """What tests and fixtures of modules make importable is not so in child processes of others: apps share names."""
    _reset_import_path()  # a fixture of a module may have loaded an app before the first of its tests
    yield
    _reset_import_path()


def _reset_import_path() -> None:
    if IMPORT_PATH is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = IMPORT_PATH


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The console and the checks of this process read all that they look for, however slow the machine is."""
    from tests.support.budgets import lengthen_budgets  # most processes of a run need no console

    lengthen_budgets(monkeypatch)


@pytest.fixture
def print_figures(capsys: pytest.CaptureFixture[str]) -> "PrintFigures":
    """Prints what a test has found, also where nothing failed."""

    def print_figures(report: "Report | None", watch: "StandstillWatch | None" = None, **more: object) -> None:
        figures = {}
        if report is not None:
            figures = {"lost": len(report.lost), "duplicated": len(report.duplicated), "stuck": 0, "dead": report.dead}
            figures |= {"committed": report.committed, "runs repeated": report.retries}
        words = [f"{name} {count}" for name, count in {**figures, **more}.items()]
        words += [f"longest standstill {watch.longest_s:.2f} s"] if watch else []
        with capsys.disabled():
            print("\n  " + ", ".join(words))  # noqa: T201

    return print_figures


@pytest.fixture
def tls() -> None:
    """Skip the test if the server of this run was chosen, and built without TLS."""
    if os.environ.get(servers.VARIABLE) and not servers.was_built_with_tls():
        pytest.skip("this server was built without TLS")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Guard the run; and let Ctrl-C reach the programs that tests interrupt.

    Where tests run side by side, their processes ignore it, and so would what they start.
    """
    if found := getattr(config, "workerinput", None):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        servers.pick_own_ports(int(found["workerid"].removeprefix("gw")), found["workercount"])
    else:
        servers.pick_own_ports(0, 1)
        guardian = config.stash[guardian_key] = RunGuardian()
        servers.choose_server(guardian.folder / "server")
        start_java_quickly()
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of a thousand processes would compile us anew
    if config.option.timeout is None:
        config.option.timeout = waiting.TEST_TIMEOUT_S


def pytest_report_header() -> str:
    """What the fail-safe of this run is, and its server."""
    server = os.environ.get(servers.VARIABLE) or "that of PATH"
    return f"slowness: {waiting.slowness():.1f}, fail-safe: {waiting.FAIL_SAFE_S:.0f} s, server: {server}"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Look for processes that the tests left behind."""
    end_template()
    if guardian := session.config.stash.get(guardian_key, None):
        interrupted = session.exitstatus == pytest.ExitCode.INTERRUPTED
        left = guardian.end(grace_s=0 if interrupted else waiting.FAIL_SAFE_S / 6)
        session.config.stash[left_key] = left
        if left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED  # it broke a promise, whatever its tests say


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what was left behind."""
    for name in config.stash.get(left_key, []):
        terminalreporter.write_line(f"FAILED left behind by the tests, and killed: {name}", red=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests stay until the end: collecting garbage among them costs each process two seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every file of tests names its area. Side by side, the tests of a Spark group stay together."""
    if lacking := {item.path.name for item in items if not any(item.get_closest_marker(area) for area in AREAS)}:
        raise pytest.UsageError(f"say with `pytestmark` which of {', '.join(AREAS)} is tested in {sorted(lacking)}")
    for item in items:
        if spark_group := _spark_group(item):
            item.add_marker(pytest.mark.xdist_group(spark_group))
            if (
                spark_group == "drivers"
                and isinstance(item, pytest.Function)
                and "quick_pythons" not in item.fixturenames
            ):
                item.fixturenames.insert(0, "quick_pythons")
    items.sort(key=_rank)


def _spark_group(item: pytest.Item) -> str | None:
    if "spark" in getattr(item, "fixturenames", ()):
        return "session"
    return "drivers" if item.get_closest_marker("drivers") else None


def _rank(item: pytest.Item) -> float:
    spark_group, folder = _spark_group(item), item.path.parent.name
    if item.get_closest_marker("waits"):
        return len(SPARK_GROUPS) - 0.5
    return (
        SPARK_GROUPS.index(spark_group)
        if spark_group
        else len(SPARK_GROUPS) + (ORDER.index(folder) if folder in ORDER else len(ORDER))
    )


@pytest.fixture(autouse=True)
def shared_clients_of_this_test() -> Iterator[None]:
    """No client that a process shares outlives a test: the next one may have a server that ended its connections."""
    yield
    shared_client.cache_clear()


if os.environ.get("MILLSTREAM_TEST_ACL"):
    LOGIN = "least:rights@"

    @pytest.fixture
    def millstream_url(millstream_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        """URL of the shared server, emptied for this test, for a user with least rights."""
        millstream_server.call("FLUSHALL")
        millstream_server.call("SCRIPT", "FLUSH")
        # Making a consumer ahead of its first read is for programs of one's own; no command and no engine does it.
        millstream_server.call(*acl_rule("least", list(RoleName)).line.split(), "+xgroup|createconsumer", ">rights")
        admin_clients: dict[str, Client] = {}
        for name in ("execute", "pipeline", "script", "scripts", "scan_streams", "scan_pages"):
            monkeypatch.setattr(Client, name, _with_all_rights_in_tests(getattr(Client, name), admin_clients))
        yield millstream_server.url.replace("://", f"://{LOGIN}")
        for admin_client in admin_clients.values():
            admin_client.close()

    def _with_all_rights_in_tests(method: Any, admin_clients: dict[str, Client]) -> Any:
        @functools.wraps(method)
        def call(self: Client, *args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            if not caller.startswith("tests.") or LOGIN not in self.url:
                return method(self, *args, **options)
            url = self.url.replace(LOGIN, "")
            return method(admin_clients.setdefault(url, Client(url, timeout_ms=self.timeout_ms)), *args, **options)

        return call
