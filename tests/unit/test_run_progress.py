"""What `millstream run` reports to people and programs: by its events alone, no Spark and no Redis."""

import json
import re
from collections.abc import Mapping

import pytest

from millstream.cli.run import Progress

pytestmark = [pytest.mark.spark]

BATCH = {"event": "batch", "handler": "pay", "batch": 0, "messages": 50, "committed": 44, "dead": 0, "retries": 1}
CAUGHT_UP = {"event": "caught-up", "handler": "pay", "messages": 0, "committed": 6, "dead": 6, "retries": 0}
STAGE = {"event": "batch", "stage": "minutes", "batch": 0, "messages": 7}


def last_line(capsys: pytest.CaptureFixture[str], *events: Mapping[str, object]) -> str:
    with Progress("shop", as_json=False) as progress:
        for event in events:
            progress.on_event(event)
    return capsys.readouterr().err.splitlines()[-1]


def test_the_last_line_has_the_totals_and_the_parked_keys(capsys: pytest.CaptureFixture[str]) -> None:
    end = {"event": "stopped", "parked": {"pay": {"keys": 1, "messages": 6}}}
    assert last_line(capsys, BATCH, CAUGHT_UP, STAGE, end) == (
        "stopped: 44 processed, 6 dead letters, 1 key parked (6 messages wait: millstream key list shop.pay)"
    )


def test_the_last_line_names_every_handler_with_parked_keys_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert last_line(capsys, BATCH, {"event": "stopped"}) == "stopped: 44 processed, 0 dead letters"
    end = {"event": "stopped", "parked": {"b": {"keys": 2, "messages": 1}, "a": {"keys": 1, "messages": 0}}}
    assert last_line(capsys, {**BATCH, "dead": 1}, end) == (
        "stopped: 43 processed, 1 dead letter, 3 keys parked (1 message waits: millstream key list shop.a, "
        "millstream key list shop.b)"
    )


def test_in_json_the_last_event_has_the_totals(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("shop", as_json=True) as progress:
        for event in (BATCH, CAUGHT_UP, STAGE, {"event": "stopped", "parked": {}}):
            progress.on_event(event)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last.pop("at_ms") > 1_700_000_000_000
    assert last == {
        "event": "stopped",
        "parked": {},
        "batches": 2,
        "messages": 57,
        "committed": 50,
        "processed": 44,
        "dead": 6,
        "retries": 1,
    }


def test_a_count_of_one_is_written_in_the_singular(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("shop", as_json=False, every_s=0) as progress:
        progress.on_event({**BATCH, "dead": 1})
        progress.on_watch(None)
    _, line = capsys.readouterr().err.splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z  .*1 batch  43 processed  1 dead letter  1 retry", line)
