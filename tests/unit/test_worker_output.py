"""The totals that `millstream worker` reports, of processes that come and go."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from millstream.cli.worker import _SupervisorOutput

pytestmark = [pytest.mark.cli]


def figures(pid: int, **counts: int) -> Mapping[str, Any]:
    return {
        "event": "figures",
        "pid": pid,
        "handlers": {
            "bill": {
                "read": 0,
                "claimed": 0,
                "committed": 0,
                "processed": counts.get("committed", 0) - counts.get("dead", 0),
                **counts,
            }
        },
    }


@pytest.mark.parametrize("second", [3, 10, 50])
def test_the_figures_of_a_dead_process_stay_in_the_totals_after_its_restart(
    second: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _SupervisorOutput(as_json=False)
    with lines.shown("shop", 2, None):
        lines.add_figures("w-0", figures(1, read=4, committed=4))
        lines.add_figures("w-0", figures(1, read=10, committed=10))
        lines.add_figures("w-1", figures(2, read=5, committed=5))
        lines.add_figures("w-0", figures(3, read=second, committed=second))
        lines.add_figures("w-0", figures(3, read=second + 1, committed=second + 1))
    assert f"{10 + 5 + second + 1} processed" in capsys.readouterr().err


def test_a_message_is_shown_as_processed_or_as_a_dead_letter_and_not_as_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = _SupervisorOutput(as_json=False)
    with lines.shown("shop", 1, None):
        lines.add_figures("w-0", figures(1, read=1_005, committed=1_000, dead=7, handed_back=5))
    _, line, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z  1,005 read  993 processed  7 dead letters  5 handed back", line)
    assert last == "stopped"
