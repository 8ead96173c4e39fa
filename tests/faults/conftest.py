"""What the fault tests share."""

from collections.abc import Iterator

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.history import Report
from tests.support.worker_processes import PrintFigures, StandstillWatch


@pytest.fixture
def fresh_client(millstream_fresh_server: EmbeddedServer) -> Iterator[Client]:
    """A client of a server of the test's own, which it may kill and reconfigure."""
    with Client(millstream_fresh_server.url) as opened:
        yield opened


@pytest.fixture
def print_figures(capsys: pytest.CaptureFixture[str]) -> PrintFigures:
    """Prints what a test has found, also where nothing failed."""

    def print_figures(report: Report | None, watch: StandstillWatch | None = None, **more: object) -> None:
        figures = {}
        if report is not None:
            figures = {"lost": len(report.lost), "duplicated": len(report.duplicated), "stuck": 0, "dead": report.dead}
            figures |= {"committed": report.committed, "runs repeated": report.retries}
        words = [f"{name} {count}" for name, count in {**figures, **more}.items()]
        words += [f"longest standstill {watch.longest_s:.2f} s"] if watch else []
        with capsys.disabled():
            print("\n  " + ", ".join(words))  # noqa: T201

    return print_figures
