"""The time that reads of Redis may take before they end with a part: a machine that stands still uses it up."""

from functools import partial

import pytest

from millstream.admin import examined_data, handler_sweep
from millstream.admin.inspection import find_stream_names, inspect, inspect_handlers
from millstream.admin.key_places import find_key_places
from millstream.admin.search import search
from millstream.admin.worker_reports import read_workers
from millstream.services.console import app
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_ranking import StreamRanking
from millstream.services.console.views import finding, keys, streams, workers

_HOUR_MS = 3_600_000.0


def lengthen_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the console and the checks of this process look for an hour: they find all, however slow the machine is."""
    monkeypatch.setattr(examined_data, inspect.__name__, partial(inspect, budget_ms=_HOUR_MS))
    monkeypatch.setattr(handler_sweep, inspect_handlers.__name__, partial(inspect_handlers, budget_ms=_HOUR_MS))
    monkeypatch.setattr(app, StreamNames.__name__, partial(StreamNames, wait_ms=_HOUR_MS))
    monkeypatch.setattr(app, StreamRanking.__name__, partial(StreamRanking, wait_ms=_HOUR_MS))
    monkeypatch.setattr(keys, find_key_places.__name__, partial(find_key_places, budget_ms=_HOUR_MS))
    monkeypatch.setattr(workers, read_workers.__name__, partial(read_workers, budget_ms=_HOUR_MS))
    monkeypatch.setattr(streams, find_stream_names.__name__, partial(find_stream_names, budget_ms=_HOUR_MS))
    monkeypatch.setattr(finding, search.__name__, partial(search, budget_ms=_HOUR_MS))
