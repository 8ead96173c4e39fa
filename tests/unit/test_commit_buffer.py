"""CommitBuffer: what a task commits and defers together, and what it has to load again."""

from collections import deque
from collections.abc import Sequence

import pytest

from millstream.delivery.effects import MAX_COMMIT_OUTPUTS, crash_counts_of
from millstream.handlers.consecutive import Stretch
from millstream.spark.engine.commit_buffer import COMMIT_BYTES, COMMIT_MESSAGES, CommitBuffer
from millstream.spark.engine.key_run import Entry, KeyRun

pytestmark = [pytest.mark.spark]


def run_of(key: bytes, *, processed: int = 1, left: int = 0) -> KeyRun:
    """A run with so many processed messages, and so many after them."""
    entries = [Entry(b"%d-0" % n, b"") for n in range(1, processed + left + 1)]
    run = KeyRun("in", key, b"k" + key, deque(entries[processed:]), covered=entries[:processed])
    for entry in run.covered:
        run.effects.add_message(entry.id_text.decode())
    return run


class Settled:
    """Stands for the committer: what was committed and deferred, in order. Refuses the runs of some keys."""

    def __init__(self, *, commits: Sequence[KeyRun] = (), deferrals: Sequence[KeyRun] = ()) -> None:
        self.calls: list[tuple[str, list[bytes | None]]] = []
        self._commits, self._deferrals = commits, deferrals

    def commit(self, runs: Sequence[KeyRun]) -> list[KeyRun]:
        self.calls.append(("commit", [run.key for run in runs]))
        return [run for run in self._commits if run in runs]

    def defer(self, runs: Sequence[KeyRun]) -> list[KeyRun]:
        self.calls.append(("defer", [run.key for run in runs]))
        return [run for run in self._deferrals if run in runs]


def flush(buffer: CommitBuffer, settled: Settled) -> list[tuple[str, list[bytes | None]]]:
    """Flush, and return the calls that this made."""
    before = len(settled.calls)
    buffer.flush(settled.commit, settled.defer)
    return settled.calls[before:]


def test_what_is_staged_is_committed_once_and_before_what_is_deferred() -> None:
    buffer, settled = CommitBuffer(), Settled()
    buffer.stage_deferral(run_of(b"waits", left=1))
    buffer.stage(run_of(b"a"))
    buffer.stage(run_of(b"b"))
    assert flush(buffer, settled) == [("commit", [b"waits", b"a", b"b"]), ("defer", [b"waits"])]
    assert flush(buffer, settled) == []


def test_a_run_without_effects_is_not_committed_and_is_deferred_all_the_same() -> None:
    buffer = CommitBuffer()
    buffer.stage(run_of(b"idle", processed=0))
    buffer.stage_deferral(run_of(b"waits", processed=0, left=1))
    assert flush(buffer, Settled()) == [("defer", [b"waits"])]


def test_a_run_whose_commit_was_refused_is_loaded_again_and_not_deferred() -> None:
    waits, other, fine = run_of(b"waits", left=1), run_of(b"other", left=1), run_of(b"fine")
    buffer = CommitBuffer()
    for run in (waits, other):
        buffer.stage_deferral(run)
    buffer.stage(fine)
    calls = flush(buffer, Settled(commits=[waits], deferrals=[other]))
    assert calls == [("commit", [b"waits", b"other", b"fine"]), ("defer", [b"other"])]
    assert buffer.pop_refused() == [waits, other]
    assert buffer.pop_refused() == []


def test_all_runs_of_a_refused_batch_are_loaded_again() -> None:
    lead, others = run_of(b"lead"), [run_of(b"second"), run_of(b"third")]
    lead.others = others
    buffer = CommitBuffer()
    buffer.stage(lead)
    flush(buffer, Settled(commits=[lead]))
    assert buffer.pop_refused() == [lead, *others]


def test_a_buffer_is_full_by_messages_or_by_bytes_and_a_flush_empties_it() -> None:
    buffer, settled = CommitBuffer(), Settled()
    for n in range(COMMIT_MESSAGES - 1):
        buffer.stage(run_of(b"%d" % n))
    assert not buffer.is_full
    buffer.stage_deferral(run_of(b"waits", processed=0, left=1))
    assert buffer.is_full
    flush(buffer, settled)
    assert not buffer.is_full
    buffer.count_bytes(COMMIT_BYTES)
    assert buffer.is_full
    assert buffer.is_filled_by(run_of(b"any"))
    flush(buffer, settled)
    assert not buffer.is_full
    assert not buffer.is_filled_by(run_of(b"short"))
    assert buffer.is_filled_by(run_of(b"long", processed=COMMIT_MESSAGES))
    many = run_of(b"many")
    many.effects.add_outputs([b"x"] * MAX_COMMIT_OUTPUTS)
    assert buffer.is_filled_by(many)
    timed = run_of(b"timed")
    timed.effects.add_timers([(b"t", "", b"")] * (MAX_COMMIT_OUTPUTS - 1))
    assert not buffer.is_filled_by(timed)
    timed.effects.add_outputs([b"x"])
    assert buffer.is_filled_by(timed)


@pytest.mark.parametrize(("state", "committed"), [(b"new", b"new"), (b"old", None)])
def test_a_state_is_committed_where_it_has_changed(state: bytes, committed: bytes | None) -> None:
    run = run_of(b"a")
    run.state, run.committed_state = state, b"old"
    CommitBuffer().stage(run)
    assert run.effects.state == committed


@pytest.mark.parametrize("from_queue", [False, True], ids=["batch", "key queue"])
def test_a_run_has_the_effects_of_all_its_stretches(from_queue: bool) -> None:
    run = KeyRun("in", b"a", b"ka", deque(Entry(b"%d-0" % n, b"") for n in range(1, 6)), from_queue=from_queue)
    run.on_committed()
    run.add_stretch(Stretch(b"one", 2, 9, [b"\x90"], [(b"t", 5, b"\x91x")]))
    run.add_stretch(Stretch(b"none", 0))
    run.add_stretch(Stretch(b"two", 2, 9, [b"\x91y"]))
    effects = run.effects
    assert [entry.id_text for entry in run.covered] == [b"1-0", b"2-0", b"3-0", b"4-0"]
    assert [entry.id_text for entry in run.entries] == [b"5-0"]
    assert (effects.first_id, effects.last_id, effects.message_count, run.state) == ("1-0", "4-0", 4, b"two")
    assert (effects.outputs, effects.timers) == ([b"\x90", b"\x91y"], [(b"t", 5, b"\x91x")])
    others = ["1-0", "2-0", "3-0"]
    assert list(effects.other_ids) == (others if from_queue else [])
    counts = [field for one in (*others, "4-0") for field in crash_counts_of(one)]
    assert list(effects.cleared_counts) == (counts if from_queue else [])


def test_there_is_room_until_a_commit_is_due() -> None:
    buffer, run = CommitBuffer(), run_of(b"a", processed=3)
    run.effects.add_outputs([b"\x90"] * 4)
    run.effects.add_timers([(b"t", 5, b"\x91x")])
    buffer.count_bytes(100)
    room = buffer.room_for(run)
    assert room == (COMMIT_MESSAGES - 3, COMMIT_BYTES - 100, MAX_COMMIT_OUTPUTS - 5)
    buffer.count_bytes(room.bytes - 1)
    assert not buffer.is_filled_by(run)
    buffer.count_bytes(1)
    assert buffer.is_filled_by(run)
