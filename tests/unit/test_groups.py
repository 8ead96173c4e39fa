"""What of the consumer groups needs no Redis: batches, options, and the file of processed ids."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream import groups
from millstream.errors import ConfigError
from millstream.groups import Batch, ClaimOptions, Consumer, Delivered, ProcessedIds, Reader, ReadPolicy, stream_details
from millstream.model import EntryId
from millstream.redis_client.client import Client

pytestmark = [pytest.mark.groups]

NOWHERE = "redis://127.0.0.1:1/0"


def test_records_that_the_package_exports_are_no_structs_and_claim_options_are_a_dataclass() -> None:
    exported = [getattr(groups, name) for name in groups.__all__]
    assert [one for one in exported if isinstance(one, type) and issubclass(one, msgspec.Struct)] == []
    assert [one.name for one in fields(ClaimOptions)] == ["idle_ms", "time_ms", "deliveries", "force", "last_id"]


def test_a_batch_makes_entries_only_when_it_is_iterated() -> None:
    raw = [[b"1-2", [b"a", b"1", b"\xff", b"2"]]]
    batch = Batch("s", raw)
    assert batch.raw is raw
    assert batch.ids == [b"1-2"]
    (entry,) = batch
    assert entry == Delivered(b"1-2", [b"a", b"1", b"\xff", b"2"], 1)
    assert entry.entry_id == EntryId(1, 2)
    assert entry.fields == {"a": b"1", "\udcff": b"2"}


def test_a_claim_cannot_set_the_delivery_time_in_two_ways() -> None:
    with pytest.raises(ConfigError, match="either"):
        ClaimOptions(idle_ms=1, time_ms=1).args()


def test_a_poll_longer_than_its_client_waits_is_refused_before_it_is_sent() -> None:
    with Client(NOWHERE, timeout_ms=1000) as client, pytest.raises(ConfigError, match="timeout_ms"):
        Consumer(client, group="g", name="c", streams=["s"]).read_new(block_ms=1000)


@pytest.mark.parametrize(
    "options",
    [
        {"count": 0},
        {"block_ms": 0},
        {"claim_after_ms": 0},
        {"noack": True, "claim_after_ms": 5},
        {"heal": "begining"},
        {"heal": None},
        {"start": "earliest"},
        {"start": ">"},
        {"start": None},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="ReadPolicy"):
        ReadPolicy(**options)


@pytest.mark.parametrize("start", ["0", "$", "5", b"5-1", EntryId(5, 1)])
def test_a_policy_begins_at_any_id_and_at_either_end(start: Any) -> None:
    assert ReadPolicy(start=start, heal=lambda stream: "0").start == start


@pytest.mark.parametrize(
    ("streams", "why"),
    [
        ([], "at least one stream"),
        ("orders", "streams='orders' is one name, not a list of names: write streams=\\['orders'\\]"),
        (b"orders", "is one name, not a list of names"),
        (["orders", ""], "non-empty text"),
        ([b"orders"], "non-empty text"),
    ],
)
def test_streams_that_are_no_list_of_names_are_refused(streams: Any, why: str) -> None:
    with Client(NOWHERE) as client:
        with pytest.raises(ConfigError, match=why):
            Reader(client, group="g", consumer="c", streams=streams)
        with pytest.raises(ConfigError, match=why):
            Consumer(client, group="g", name="c", streams=streams)


@pytest.mark.parametrize("after", [">", "$", "+", {"s": ">"}, None])
def test_pending_entries_are_read_after_an_id_and_nothing_else(after: Any) -> None:
    with Client(NOWHERE) as client, pytest.raises(ConfigError, match="must be an entry id"):
        Consumer(client, group="g", name="c", streams=["s"]).read_pending(after=after)


def test_a_count_of_zero_is_refused() -> None:
    with Client(NOWHERE) as client:
        consumer = Consumer(client, group="g", name="c", streams=["s"])
        for read in (consumer.read_new, consumer.read_pending, lambda count: stream_details(client, "s", count=count)):
            with pytest.raises(ConfigError, match="count=0"):
                read(count=0)


def test_recovered_entries_have_their_delivery_counts_where_those_were_requested() -> None:
    batch = Batch("s", [[b"1-0", []], [b"2-0", []]], recovered=True)
    batch.delivery_counts = {b"2-0": 3}
    assert [one.deliveries for one in batch] == [0, 3]


def test_processed_ids_are_known_again_after_a_restart(tmp_path: Path) -> None:
    done = ProcessedIds(tmp_path / "done")
    assert done.last_id("s") is None
    done.add("s", [b"1-0", b"3-0"])
    done.add("\udcff", [b"9-9"])
    again = ProcessedIds(tmp_path / "done")
    assert ("s", b"3-0") in again
    assert ("s", b"2-0") not in again
    assert ("other", b"3-0") not in again
    assert ("\udcff", b"9-9") in again
    assert again.last_id("s") == b"3-0"


def test_only_the_latest_ids_are_kept(tmp_path: Path) -> None:
    done = ProcessedIds(tmp_path / "done", keep=2)
    done.add("s", [b"1-0", b"2-0", b"2-0", b"3-0"])
    for file in (done, ProcessedIds(tmp_path / "done", keep=2)):
        assert [("s", b"%d-0" % n) in file for n in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize("at", [0, 20, 90, -1])
def test_a_file_of_processed_ids_with_a_flipped_bit_is_refused_by_name(tmp_path: Path, at: int) -> None:
    path = tmp_path / "done"
    ProcessedIds(path).add("s", [b"1-0"])
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"done is damaged.*delete it"):
        ProcessedIds(path)


def test_a_truncated_file_of_processed_ids_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "done"
    ProcessedIds(path).add("s", [b"1-0"])
    for size in range(path.stat().st_size):
        path.write_bytes(path.read_bytes()[:size] if size else b"")
        with pytest.raises(ConfigError, match="damaged"):
            ProcessedIds(path)
        path.unlink()
        ProcessedIds(path).add("s", [b"1-0"])


def test_processed_ids_are_appended_and_the_file_is_rewritten_from_time_to_time(tmp_path: Path) -> None:
    path = tmp_path / "done"
    done = ProcessedIds(path, keep=10)
    done.add("s", [b"0-1"])
    file, sizes = path.stat().st_ino, []
    for n in range(1, 101):
        done.add("t" if n % 2 else "s", [b"%d-0" % n])
        sizes.append(path.stat().st_size)
        if n < 10:
            assert path.stat().st_ino == file
    assert max(sizes[50:]) <= max(sizes[:50]) + 100, "ids of more digits"
    for found in (done, ProcessedIds(path, keep=10)):
        assert [("s", b"%d-0" % n) in found for n in (80, 82, 100)] == [False, True, True]
        assert [found.last_id(stream) for stream in "st"] == [b"100-0", b"99-0"]


def test_a_crash_in_the_middle_of_an_append_loses_only_what_was_not_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "done"
    done = ProcessedIds(path)
    for n in range(1, 4):
        before = path.stat().st_size if n > 1 else 0
        done.add("s", [b"%d-0" % n])
    whole = path.read_bytes()
    torn = [whole[:size] for size in range(before, len(whole))]
    torn += [whole[:before] + bytes(len(whole) - before), whole[:before] + bytes(50) + whole[before + 50 :]]
    for content in torn:
        path.write_bytes(content)
        again = ProcessedIds(path)
        assert [("s", b"%d-0" % n) in again for n in (1, 2, 3)] == [True, True, False]
        again.add("s", [b"4-0"])
        assert [("s", b"%d-0" % n) in ProcessedIds(path) for n in (1, 2, 3, 4)] == [True, True, False, True]


def test_a_file_that_is_damaged_before_its_last_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "done"
    done = ProcessedIds(path)
    for n in range(1, 4):
        done.add("s", [b"%d-0" % n])
    whole = path.read_bytes()
    for at in range(whole.rindex(b"\n", 0, -1)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ConfigError, match="damaged"):
            ProcessedIds(path)


def test_an_append_that_failed_is_written_again_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "done"
    done = ProcessedIds(path)
    done.add("s", [b"1-0"])
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda descriptor: _raise(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            done.add("s", [b"2-0"])
    path.write_bytes(path.read_bytes()[:-3])
    done.add("s", [b"3-0"])
    assert [("s", b"%d-0" % n) in ProcessedIds(path) for n in (1, 2, 3)] == [True] * 3
    path.unlink()
    done.add("s", [b"4-0"])
    assert [("s", b"%d-0" % n) in ProcessedIds(path) for n in (1, 2, 3, 4)] == [True] * 4


def _raise(error: OSError) -> None:
    raise error


def test_a_crash_before_the_file_is_renamed_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = ProcessedIds(tmp_path / "done", keep=1)
    done.add("s", [b"1-0"])

    def crash(descriptor: int) -> None:
        raise OSError("no power")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="no power"):
        done.add("s", [b"2-0"])
    again = ProcessedIds(tmp_path / "done")
    assert ("s", b"1-0") in again
    assert ("s", b"2-0") not in again
