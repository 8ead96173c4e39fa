"""What the fault tests share."""

import pytest

from millstream.testing.history import Report
from tests.support.worker_processes import PrintFigures, StandstillWatch


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
