"""The history checker finds every planted fault, takes no other for it, and finds nothing in a valid history."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError, MillstreamError
from millstream.testing.history import (
    Event,
    Fault,
    HistoryError,
    Kind,
    Recorder,
    Report,
    check,
    check_outputs,
    read_events,
)

pytestmark = [pytest.mark.worker, pytest.mark.keys]

EFFECTS: tuple[Kind, ...] = ("committed", "dead")


def event(kind: Kind, number: int, *, key: bytes | None = b"k", worker: str = "w1", **more: Any) -> Event:
    handler = "" if kind == "enqueued" else more.pop("handler", "h")
    return Event(kind=kind, stream="s", id=f"5-{number}", key=key, handler=handler, worker=worker, **more)


def enqueued(*numbers: int, key: bytes | None = b"k") -> list[Event]:
    return [event("enqueued", number, key=key) for number in numbers]


def committed(*numbers: int, **more: Any) -> list[Event]:
    return [event("committed", number, **more) for number in numbers]


def found(report: Report) -> dict[str, list[tuple[str, ...]]]:
    """The kinds of faults with findings, and the ids of each."""
    return {fault: [one.ids for one in report.findings(fault)] for fault in get_args(Fault) if report.findings(fault)}


# Planted faults


def test_a_history_in_order_has_no_findings_and_counts_its_events() -> None:
    runs = [event("started", 9), event("ended", 9), event("started", 9), event("ended", 9)]
    report = check([*enqueued(9, 10), *runs, *committed(9), event("fenced", 9), event("dead", 10)])
    assert report.ok
    assert report.summary() == "ok (2 enqueued, 1 committed, 1 dead, 1 fenced, 2 started, 1 retries)"


def test_an_entry_without_an_effect_is_lost_once_the_stream_is_drained() -> None:
    log = [*enqueued(1, 2), event("started", 2), *committed(1)]
    assert found(check(log)) == {"lost": [("5-2",)]}
    assert check(log, drained=False).ok


def test_an_overtaken_entry_without_an_effect_is_lost_and_not_out_of_order_as_well() -> None:
    assert found(check([*enqueued(1, 2, 3), *committed(2, 3)])) == {"lost": [("5-1",)]}


def test_an_open_entry_that_others_overtook_is_out_of_order_while_the_stream_is_not_drained() -> None:
    log = [*enqueued(1, 2, 3, 4), event("committed", 2, position=1)]
    assert found(check(log, drained=False)) == {"out_of_order": [("5-1", "5-2")]}
    assert found(check([*log, event("dead", 3)], drained=False)) == {"out_of_order": [("5-1", "5-2")]}


def test_the_entries_of_a_stream_without_any_effect_are_lost() -> None:
    report = check(enqueued(1))
    assert found(report) == {"lost": [("5-1",)]}
    assert found(check(enqueued(1), handlers={"s": []})) == {}


@pytest.mark.parametrize("kind", EFFECTS)
def test_an_effect_on_an_entry_that_was_never_enqueued_is_unexpected(kind: Kind) -> None:
    assert found(check([*enqueued(1), *committed(1), event(kind, 0)])) == {"unexpected": [("5-0",)]}


def test_each_handler_has_to_settle_each_entry() -> None:
    log = [*enqueued(1, 2), *committed(1, 2, handler="a"), *committed(1, handler="b")]
    (finding,) = check(log).lost
    assert (finding.handler, finding.ids) == ("b", ("5-2",))
    (finding,) = check(log, handlers={"s": ["a", "c"]}).unexpected
    assert (finding.handler, finding.ids) == ("b", ("5-1",))
    assert [f.handler for f in check(log, handlers={"s": ["a", "c"]}).lost] == ["c", "c"]


@pytest.mark.parametrize("again", [["committed", "committed"], ["committed", "dead"], ["dead", "dead"]])
def test_two_effects_on_one_entry_are_one_duplicate_and_no_disorder(again: list[Kind]) -> None:
    log = [*enqueued(1, 2), event(again[0], 1), *committed(2), event(again[1], 1)]
    assert found(check(log)) == {"duplicated": [("5-1",)]}


def test_the_same_id_in_two_streams_or_for_two_handlers_is_no_duplicate() -> None:
    log = [*enqueued(1), *committed(1, handler="a"), *committed(1, handler="b")]
    log += [replace(each, stream="other") for each in log]
    assert check(log).ok


def test_a_commit_after_a_later_one_of_its_key_is_out_of_order() -> None:
    report = check([*enqueued(1, 2, 3, 4), *committed(1, 3), event("dead", 4), *committed(2)])
    assert found(report) == {"out_of_order": [("5-2", "5-3")]}


def test_ids_compare_as_numbers() -> None:
    assert check([*enqueued(9, 10), *committed(9, 10)]).ok
    assert found(check([*enqueued(9, 10), *committed(10, 9)])) == {"out_of_order": [("5-9", "5-10")]}


def test_other_keys_and_entries_without_a_key_may_overtake() -> None:
    log = [*enqueued(1), *enqueued(2, key=b"other"), *enqueued(3, 4, key=None)]
    assert check([*log, *committed(4, 3, key=None), *committed(2, key=b"other"), *committed(1)]).ok


def test_a_handlers_own_key_counts_before_that_of_the_enqueued_event() -> None:
    log = enqueued(1, 2)
    own_keys = [event("committed", 2, key=b"x"), event("committed", 1, key=b"y")]
    assert check([*log, *own_keys]).ok
    assert found(check([*log, *committed(2, 1, key=None)])) == {"out_of_order": [("5-1", "5-2")]}


def test_a_position_orders_effects_whatever_the_clocks_say() -> None:
    log = enqueued(1, 2)
    right = [event("committed", 2, position=8, at=1.0), event("committed", 1, position=7, at=2.0)]
    wrong = [event("committed", 1, position=8, at=1.0), event("committed", 2, position=7, at=2.0)]
    assert check(log + right).ok
    assert found(check(log + wrong)) == {"out_of_order": [("5-1", "5-2")]}


def test_an_effect_with_a_position_is_not_compared_with_one_without() -> None:
    log = [*enqueued(1, 2, 3), event("committed", 3, position=1), event("dead", 1), event("dead", 2)]
    assert check(log).ok


def test_a_clock_that_only_some_events_have_orders_nothing() -> None:
    log = [*enqueued(1, 2), event("committed", 1, at=2.0), event("committed", 2, at=1.0)]
    assert found(check(log)) == {"out_of_order": [("5-1", "5-2")]}
    assert check([*log[:3], replace(log[3], at=None)]).ok


def run(number: int, worker: str, begin: float, end: float) -> list[Event]:
    return [event("started", number, worker=worker, at=begin), event("ended", number, worker=worker, at=end)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (run(1, "a", 1, 3), run(1, "b", 2, 4)),
        (run(1, "a", 1, 3), run(2, "a", 2, 4)),
        (run(1, "a", 1, 5), run(2, "b", 2, 3)),
        (run(1, "a", 1, 3), run(2, "b", 2, 2)[:1]),
    ],
    ids=["same entry", "same worker", "within", "killed within"],
)
def test_runs_of_one_key_that_overlap_are_found(first: list[Event], second: list[Event]) -> None:
    log = [*enqueued(1, 2), *second, *first, *committed(1, 2)]
    (finding,) = check(log).overlapping
    assert found(check(log)) == {"overlapping": [(second[0].id, first[0].id)]}
    assert "by a" in finding.expected
    assert check(log, overlap=False).ok


def test_each_run_that_begins_within_a_long_one_is_an_overlap() -> None:
    log = [*enqueued(1, 2, 3), *run(1, "a", 1, 9), *run(2, "b", 2, 3), *run(3, "b", 4, 5), *committed(1, 2, 3)]
    assert found(check(log)) == {"overlapping": [("5-2", "5-1"), ("5-3", "5-1")]}


def test_runs_that_only_touch_or_belong_to_other_keys_do_not_overlap() -> None:
    other = [replace(each, key=b"other", id="6-0") for each in run(1, "b", 1, 9)]
    log = [*enqueued(1, 2), *run(2, "b", 3, 4), *run(1, "a", 1, 3), *other, *committed(1, 2)]
    assert check(log, drained=False).overlapping == []


def test_a_run_of_a_killed_worker_overlaps_no_later_run() -> None:
    log = [*enqueued(1), *run(1, "a", 1, 1)[:1], *run(1, "b", 2, 3), *run(1, "a", 4, 5), *committed(1)]
    assert check(log).ok
    assert check(log).retries == 2


@pytest.mark.parametrize("kind", EFFECTS)
def test_an_effect_with_a_lower_token_than_the_key_has_seen_is_stale(kind: Kind) -> None:
    log = [*enqueued(1, 2, 3), *committed(1, token=7), event(kind, 2, token=5), *committed(3, token=6)]
    assert found(check(log)) == {"stale": [("5-2",), ("5-3",)]}


def test_a_token_that_was_only_granted_makes_older_commits_stale_too() -> None:
    log = [*enqueued(1), event("started", 1, token=7), *committed(1, token=6)]
    assert found(check(log)) == {"stale": [("5-1",)]}


def test_a_fenced_commit_with_an_old_token_is_no_finding() -> None:
    log = [*enqueued(1, 2), *committed(1, token=7), event("fenced", 2, token=6), *committed(2, token=7)]
    assert check(log).ok


def test_tokens_are_seen_per_key_and_ordered_by_position() -> None:
    log = [*enqueued(1), *enqueued(2, key=b"other"), *committed(1, token=7)]
    assert check([*log, *committed(2, key=b"other", token=6)]).ok
    late_record = [event("committed", 2, token=7, position=2), event("committed", 1, token=6, position=1)]
    assert check([*enqueued(1, 2), event("started", 2, token=7), *late_record]).ok


@pytest.mark.parametrize("bad", [{"kind": "comitted"}, {"id": "five"}])
def test_events_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    log = [replace(each, **bad) for each in (*enqueued(1), *committed(1))]
    with pytest.raises(ConfigError, match=next(iter(bad.values()))):
        check([*enqueued(2), *log, *committed(2)])


# Random histories

Timeline = list[Event]
KEYS = (b"a", b"\xff\\", None)


def timeline(rng: Random) -> Timeline:
    """A valid history in true order: entries of each key run one after the other, on owners that change."""
    entries = [(f"{5 + n // 12}-{n % 12}", rng.choice(KEYS)) for n in range(rng.randint(1, 30))]
    events = [Event(kind="enqueued", stream="s", id=entry, key=key) for entry, key in entries]
    histories: dict[tuple[str, object], list[Event]] = {}
    for handler in ("h", "g")[: rng.randint(1, 2)]:
        owners: dict[tuple[str, object], int] = {}
        for entry, key in entries:
            owner_key = handler, entry if key is None else key
            histories.setdefault(owner_key, []).extend(history_of(rng, handler, entry, key, owners.get(owner_key, 1)))
            owners[owner_key] = histories[owner_key][-1].token or 1
    while histories:
        chosen = rng.choice(sorted(histories, key=repr))
        events.append(histories[chosen].pop(0))
        if not histories[chosen]:
            del histories[chosen]
    return events


def history_of(rng: Random, handler: str, entry: str, key: bytes | None, token: int) -> Iterable[Event]:
    """One entry from its first start to its effect: retries, killed workers and hand-over included."""

    def step(kind: Kind) -> Event:
        owner = f"w{token % 3}"
        return Event(kind=kind, stream="s", id=entry, key=key, handler=handler, worker=owner, token=token)

    for _ in range(rng.choice((0, 0, 1, 2))):
        yield step("started")
        if rng.random() < 0.5:
            yield step("ended")
        if rng.random() < 0.5:
            token += 1
    yield step("started")
    yield step("ended")
    yield step("committed" if rng.random() < 0.8 else "dead")


def as_one_file(_: Random, events: Timeline) -> Timeline:
    return events


def as_files_of_one_machine(rng: Random, events: Timeline) -> Timeline:
    return split(rng, [replace(each, at=float(moment)) for moment, each in enumerate(events)])


def as_files_with_positions(rng: Random, events: Timeline) -> Timeline:
    stamped = [
        replace(each, position=n, at=rng.random()) if each.kind in EFFECTS else replace(each, at=float(n))
        for n, each in enumerate(events)
    ]
    return split(rng, stamped)


def split(rng: Random, events: Timeline) -> Timeline:
    """The same events as the concatenated files of their workers, in any order of the files."""
    workers = sorted({each.worker for each in events})
    rng.shuffle(workers)
    return [each for worker in workers for each in events if each.worker == worker]


Shape = Callable[[Random, Timeline], Timeline]
SHAPES: Sequence[Shape] = (as_one_file, as_files_of_one_machine, as_files_with_positions)


@given(seed=st.integers(0, 2**32), shape=st.sampled_from(SHAPES), drained=st.booleans())
def test_a_valid_history_is_clean_however_it_was_written_down(seed: int, shape: Shape, drained: bool) -> None:
    rng = Random(seed)
    assert check(shape(rng, timeline(rng)), drained=drained).summary().startswith("ok ")


@given(seed=st.integers(0, 2**32), cut=st.floats(0, 1))
def test_every_beginning_of_a_valid_history_is_clean_while_it_runs(seed: int, cut: float) -> None:
    events = timeline(Random(seed))
    assert found(check(events[: int(cut * len(events))], drained=False)) == {}


Mutation = Callable[[Random, Timeline], dict[str, list[str]]]


def drop(rng: Random, events: Timeline) -> dict[str, list[str]]:
    effect = rng.choice([each for each in events if each.kind in EFFECTS])
    events.remove(effect)
    return {"lost": [effect.id]}


def duplicate(rng: Random, events: Timeline) -> dict[str, list[str]]:
    effect = rng.choice([each for each in events if each.kind in EFFECTS])
    events.append(replace(effect, token=None, kind=rng.choice(EFFECTS)))
    return {"duplicated": [effect.id]}


def swap(rng: Random, events: Timeline) -> dict[str, list[str]]:
    spots = effects_of_one_key(rng, events)
    if len(spots) < 2:
        return {}
    first, last = sorted(rng.sample(range(len(spots)), 2))
    overtaken = [events[spot].id for spot in spots[first:last]]
    early, late = events[spots[first]], events[spots[last]]
    events[spots[first]] = replace(early, id=late.id)
    events[spots[last]] = replace(late, id=early.id)
    return {"out_of_order": overtaken}


def commit_with_an_old_token(rng: Random, events: Timeline) -> dict[str, list[str]]:
    spots = effects_of_one_key(rng, events)[1:]
    if not spots:
        return {}
    spot = rng.choice(spots)
    events[spot] = replace(events[spot], token=0)
    return {"stale": [events[spot].id]}


def overlap(rng: Random, events: Timeline) -> dict[str, list[str]]:
    runs = [spot for spot, each in enumerate(events) if each.kind == "ended" and each.key is not None]
    if not runs:
        return {}
    spot = rng.choice(runs)
    events.insert(spot, replace(events[spot], kind="started", worker="intruder"))
    return {"overlapping": [events[spot].id]}


def effects_of_one_key(rng: Random, events: Timeline) -> list[int]:
    """The places of all effects of one handler and key, in order."""
    keyed = [n for n, each in enumerate(events) if each.kind in EFFECTS and each.key is not None]
    if not keyed:
        return []
    one = events[rng.choice(keyed)]
    return [n for n in keyed if (events[n].handler, events[n].key) == (one.handler, one.key)]


@pytest.mark.parametrize("mutate", [drop, duplicate, swap, commit_with_an_old_token, overlap])
@given(seed=st.integers(0, 2**32), shape=st.sampled_from(SHAPES))
def test_a_single_planted_fault_is_found_and_nothing_else(mutate: Mutation, seed: int, shape: Shape) -> None:
    rng = Random(seed)
    events = timeline(rng)
    expected = mutate(rng, events)
    report = check(shape(rng, events), handlers={"s": sorted({each.handler for each in events} - {""})})
    assert {fault: sorted(ids[0] for ids in each) for fault, each in found(report).items()} == {
        fault: sorted(ids) for fault, ids in expected.items()
    }


def test_a_long_history_of_one_key_is_checked_in_linear_time_in_order_or_not() -> None:
    entries, effects = enqueued(*range(20_000)), committed(*range(20_000), token=1)
    assert check(entries + effects).ok
    assert len(check(entries + effects[::-1]).out_of_order) == 19_999


# Effects in an output stream


def test_outputs_in_source_order_are_clean_and_ties_keep_their_source_order() -> None:
    source = {"N1": ["z", "a"], "N2": ["m"], None: ["q", "p"]}
    outputs = [("N1", "z"), (None, "p"), ("N1", "a"), (None, "q")]
    assert check_outputs(source, outputs, ["m"]).summary().startswith("ok (5 enqueued, 4 committed, 1 dead")


@pytest.mark.parametrize(
    ("outputs", "dead", "expected"),
    [
        (["z", "m"], [], {"lost": [("a",)]}),
        (["a", "m"], [], {"lost": [("z",)]}),
        (["z", "a", "z", "m"], [], {"duplicated": [("z",)]}),
        (["z", "a", "m"], ["z"], {"duplicated": [("z",)]}),
        (["a", "z", "m"], [], {"out_of_order": [("z", "a")]}),
        (["z", "a", "m", "b"], [], {"unexpected": [("b",)]}),
        (["z", "a", "m"], ["b"], {"unexpected": [("b",)]}),
        (["m"], ["a", "z"], {}),
    ],
)
def test_a_fault_in_an_output_stream_is_found(
    outputs: list[str], dead: list[str], expected: dict[str, list[tuple[str, ...]]]
) -> None:
    source = {b"N1": ["z", "a", "m"]}
    assert found(check_outputs(source, [(b"N1", entry) for entry in outputs], dead)) == expected


def test_an_output_under_another_key_is_unexpected_there_and_lost_here() -> None:
    report = check_outputs({"N1": ["a"], "N2": ["b"]}, [("N2", "a"), ("N2", "b")])
    assert found(report) == {"lost": [("a",)], "unexpected": [("a",)]}
    assert (report.lost[0].key, report.unexpected[0].key) == (b"N1", b"N2")


def test_an_id_that_the_source_has_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a' occurs twice"):
        check_outputs({"N1": ["a"], "N2": ["a"]}, [])


# Reports


def test_a_report_is_ready_for_json() -> None:
    log = [*enqueued(1, key=b"\xff"), *enqueued(2), *committed(2), *committed(2)]
    report = json.loads(json.dumps(check(log).as_dict()))
    assert (report["ok"], report["enqueued"], report["torn"]) == (False, 2, [])
    assert report["duplicated"][0]["found"] == "2 x committed"
    (lost,) = report["lost"]
    assert lost == {
        "fault": "lost",
        "handler": "h",
        "stream": "s",
        "key": "\\xff",
        "ids": ["5-1"],
        "expected": "an effect",
        "found": "none",
    }


def test_a_bad_history_raises_with_the_first_five_findings_of_each_kind() -> None:
    report = check([*enqueued(*range(8)), *committed(6), event("dead", 6)])
    with pytest.raises(HistoryError) as caught:
        report.raise_if_bad()
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, MillstreamError)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("7 lost, 1 duplicated (8 enqueued")
    assert lines[1] == "  lost: h s 5-0 of key k: expected an effect, found none"
    assert lines[6] == "  lost: and 2 more"
    assert lines[7].endswith("5-6 of key k: expected one effect, found 1 x committed and 1 x dead")
    assert pickle.loads(pickle.dumps(caught.value)).report == report
    check([*enqueued(1), *committed(1)]).raise_if_bad()


# Logs


def line(**more: Any) -> str:
    return json.dumps({"kind": "enqueued", "stream": "s", "id": "5-1", **more})


keys = st.none() | st.binary() | st.sampled_from([b"", b"\\", b"\\x41", b"\xc3\xa9", b"\xff\\\\xff", b"\n"])
logged = st.builds(
    Event,
    kind=st.sampled_from(get_args(Kind)),
    key=keys,
    cost=st.floats(0, 1e9),
    **dict.fromkeys(("at", "due", "asked"), st.none() | st.floats(0, 1e12)),
    **dict.fromkeys(("stream", "id", "handler", "worker", "timer", "limited", "note"), st.text()),
    **dict.fromkeys(("token", "position"), st.none() | st.integers(0, 2**62)),
)


@given(events=st.lists(logged))
def test_recorded_events_are_read_back_byte_for_byte(
    events: list[Event], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    with Recorder(path, clock=None) as recorder:
        for each in events:
            recorder.record(each)
    assert read_events(path).events == events


def test_keys_stay_readable_in_the_log(tmp_path: Path) -> None:
    with Recorder(tmp_path / "log") as recorder:
        recorder.record(event("committed", 1, key="é\\".encode() + b"\xff"))
    assert json.loads((tmp_path / "log").read_text("utf-8"))["key"] == "é\\\\\\xff"


class Ticks:
    """A clock that a test sets."""

    now_ms = 0.0

    def monotonic_ms(self) -> float:
        return self.now_ms

    def sleep_ms(self, duration_ms: float) -> None:
        self.now_ms += duration_ms


def test_a_recorder_stamps_events_that_have_no_time_yet(tmp_path: Path) -> None:
    clock = Ticks()
    with Recorder(tmp_path / "log", sync=True, clock=clock) as recorder:
        clock.sleep_ms(12.5)
        recorder.record(event("committed", 1))
        recorder.record(event("committed", 2, at=3.0))
    assert [each.at for each in read_events(tmp_path / "log")] == [12.5, 3.0]


def test_threads_may_share_a_recorder(tmp_path: Path) -> None:
    with Recorder(tmp_path / "log") as recorder, ThreadPoolExecutor(4) as threads:
        list(threads.map(recorder.record, enqueued(*range(800))))
    assert len(read_events(tmp_path / "log").events) == 800


def test_a_full_disk_is_an_error_not_a_silent_gap() -> None:
    with Recorder("/dev/full") as recorder, pytest.raises(OSError, match="No space left"):
        recorder.record(event("committed", 1))


def test_files_follow_each_other_and_lines_may_come_without_their_ends(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"{line(id='5-1')}\n\n{line(id='5-2', later_field=1)}\n")
    log = read_events(tmp_path / "log", [line(id="5-3"), line(id="5-4").encode()], [])
    assert [each.id for each in log] == ["5-1", "5-2", "5-3", "5-4"]


def test_a_torn_last_line_is_reported_and_the_next_process_goes_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole = (line(id="5-1") + "\n").encode()
    last = (line(id="5-2", key="é", note="cut } off") + "\n").encode()
    for size in range(1, len(last) - 1):
        path.write_bytes(whole + last[:size])
        log = read_events(path)
        assert ([each.id for each in log], log.torn) == (["5-1"], [f"{path}:2"])
        with Recorder(path) as recorder:
            recorder.record(event("enqueued", 3))
        log = read_events(path)
        assert ([each.id for each in log], log.torn) == (["5-1", "5-3"], [f"{path}:2"])
    report = check(log, drained=False)
    assert report.ok
    assert report.summary().endswith(", 1 torn lines)")


def test_a_line_that_lacks_only_its_end_counts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(line(id="5-1"))
    assert len(read_events(path).events) == 1
    Recorder(path).close()
    log = read_events(path)
    assert (len(log.events), log.torn) == (1, [])


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (['{"kind": "enq', line()], "lines:1"),
        ([line() + "\n", '{"kind": "enq\n'], "lines:2"),
        ([line(), "[1]"], "lines:2"),
        ([line(kind="comitted")], "lines:1"),
        ([line(key="\\x4")], "lines:1"),
        ([line(key="a\\b")], "lines:1"),
        ([line(key=7)], "lines:1"),
        ([line(stream=None)], "lines:1"),
        (['{"kind": "enqueued"}'], "lines:1"),
    ],
)
def test_a_line_that_is_no_event_is_refused_with_its_place(lines: list[str], where: str) -> None:
    with pytest.raises(ConfigError, match=f"{where}: .*correct or remove"):
        read_events(lines)


WRITER = """
import sys
from millstream.testing.history import Event, Recorder
with Recorder(sys.argv[1]) as recorder:
    for n in range(int(sys.argv[2]), 10**9):
        recorder.record(Event(kind="enqueued", stream="s", id=f"5-{n}", key=b"k", note="x" * (n * 997 % 20000)))
        if n % 100 == 0:
            print(n, flush=True)
"""


def test_a_recorder_killed_while_it_writes_leaves_a_readable_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    seen = 0
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(seen)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        with writer:
            assert writer.stdout is not None
            written = [int(writer.stdout.readline()) for _ in range(3)]
            writer.send_signal(signal.SIGKILL)
        log = read_events(path)
        assert len(log.torn) <= 3
        assert [each.id for each in log] == [f"5-{n}" for n in range(len(log.events))]
        assert len(log.events) > written[-1], "an event that the process was told is written is missing"
        seen = len(log.events)
