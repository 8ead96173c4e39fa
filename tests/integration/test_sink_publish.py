"""The sink's protocol, without Spark: staged by tasks, published once and whole, whichever process dies and whichever wakes up late."""

import threading
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from millstream.errors import BatchBehind, DataLoss, OutOfMemory, OutputError, StaleOwner, WrongType
from millstream.handlers.encoding import raw
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.scripts import Script
from millstream.spark.sink import Stage, StagedTask, WriteOptions, begin, token_of
from millstream.spark.sink import publication as publication_module
from millstream.testing.topologies import cluster
from tests.support.sink_fixtures import SINK, STREAMS, Killed, Run, check, killed_at, published, rows_of, staged
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.sink]


def test_a_batch_is_published_in_order_of_tasks_and_rows_and_leaves_nothing_behind(client: Client) -> None:
    run = Run(client, "one")
    shares = run.stage(0, range(5_000), tasks=3)
    assert all(client.execute("EXISTS", stream) == 0 for stream in STREAMS), "nothing is visible before the commit"
    assert run.commit(0, shares)
    assert run.batch(1, range(5_000, 5_100), tasks=1)
    check(client, range(5_100))


def test_a_batch_that_is_run_again_is_published_once(client: Client) -> None:
    run = Run(client, "one")
    shares = run.stage(0, range(100))
    assert run.commit(0, shares)
    assert not run.commit(0, shares)
    assert not run.batch(0, range(100), tasks=4)
    assert not Run(client, "after a restart").batch(0, range(100), tasks=1)
    check(client, range(100))


@pytest.mark.parametrize("arrives", [False, True], ids=["before the request arrives", "before the reply arrives"])
def test_a_kill_at_any_exchange_with_redis_is_followed_by_a_run_that_publishes_all_once(
    client: Client, arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "_CALLS_PER_TRIP", 1)  # so that there is a kill between any two chunks
    exchange, ended = 0, False
    while not ended:
        exchange += 1
        client.execute("FLUSHALL")
        Run(client, "before").batch(0, range(30))
        with killed_at(exchange, arrives=arrives) as was_killed:
            Run(client, "killed").batch(1, range(30, 7_000))
        ended = not was_killed()
        restarted = Run(client, "restarted")
        restarted.batch(1, range(30, 7_000), tasks=3)  # another number of cores
        restarted.batch(2, range(7_000, 7_030))
        check(client, range(7_030))
    assert exchange > 15, "all of it was tried"


def test_a_run_that_dies_repeatedly_while_it_publishes_still_completes(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "_CALLS_PER_TRIP", 1)
    for run in range(60):
        with killed_at(12 + run, arrives=bool(run % 2)) as was_killed:
            Run(client, f"run {run}").batch(0, range(9_000), tasks=1 + run % 3)
        if not was_killed():
            break
    else:
        pytest.fail("it never came to its end")
    assert run > 2
    check(client, range(9_000))


def test_a_stream_shows_a_decided_batch_in_order_while_it_is_published(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "_CALLS_PER_TRIP", 1)
    Run(client, "killed").decide_and_die(0, range(9_000), trips=5)
    found = {stream: published(client, stream) for stream in STREAMS}
    assert 0 < sum(map(len, found.values())) < 9_000
    assert all(
        numbers == [n for n in range(9_000) if n % 3 == place][: len(numbers)]
        for place, numbers in enumerate(found.values())
    )


# --- Twins, zombies and failures ---


def test_rows_staged_by_lost_task_attempts_are_not_published_and_are_removed(client: Client) -> None:
    run = Run(client, "one")
    failed, winner, twin = (run.task(0, 0, range(50)) for _ in range(3))
    other = run.task(0, 1, range(50, 100))
    assert len({failed.token, winner.token, twin.token}) == 3
    assert run.commit(0, [other, winner])
    check(client, range(100))


def test_a_new_run_removes_no_rows_of_a_decided_batch(client: Client) -> None:
    Run(client, "killed").decide_and_die(0, range(9_000))
    kept = set(staged(client))
    Run(client, "next").task(0, 0, [])
    assert set(staged(client)) == kept
    Run(client, "one more").batch(0, range(9_000))
    check(client, range(9_000))


def test_rows_of_a_dead_run_are_removed_when_the_next_run_begins(client: Client) -> None:
    Run(client, "dead").stage(0, range(3_000))
    assert staged(client)
    Run(client, "next").task(0, 0, [])
    assert staged(client) == []


def test_a_zombie_cannot_publish_over_a_newer_run(client: Client) -> None:
    zombie, newer = Run(client, "zombie"), Run(client, "newer")
    late = zombie.stage(0, range(100))
    fresh = newer.stage(0, range(100))
    with pytest.raises(StaleOwner, match="a newer run of the sink query has taken over"):
        zombie.commit(0, late)
    with pytest.raises(StaleOwner):
        zombie.task(0, 0, range(10))
    assert newer.commit(0, fresh)
    with pytest.raises(StaleOwner):
        zombie.commit(0, late)
    check(client, range(100))


def dies(*_: object) -> NoReturn:
    raise Killed


@pytest.mark.parametrize(
    "before",
    [publication_module.Publication._close_parts.__name__, publication_module.Publication._call_record.__name__],
)
@pytest.mark.parametrize("commits", [0, 1, 2])
def test_a_zombie_that_wakes_up_before_any_step_to_its_decision_decides_nothing(
    client: Client, before: str, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie, newer = Run(client, "zombie"), Run(client, "newer")
    step = getattr(zombie.publication, before)
    staged_since: list[list[StagedTask]] = []

    def sleep_first(*args: Any, **options: Any) -> Any:
        if not staged_since and (
            before != publication_module.Publication._call_record.__name__ or args[0] is publication_module.DECIDE
        ):
            staged_since.append(newer.stage(0, range(9_000), tasks=1))
            if commits == 1:
                newer.commit(0, staged_since[0])
            if commits == 2:  # it dies of it
                newer.publication._drain = dies  # type: ignore[method-assign, assignment]
                with suppress(Killed):
                    newer.commit(0, staged_since[0])
        return step(*args, **options)

    monkeypatch.setattr(zombie.publication, before, sleep_first)
    with pytest.raises((StaleOwner, DataLoss)):
        zombie.batch(0, range(9_000))
    assert staged_since
    if commits == 0:
        assert newer.commit(0, staged_since[0])
    Run(client, "last").batch(1, range(9_000, 9_100))
    check(client, range(9_100))


def test_a_zombie_cannot_end_the_publication_of_a_later_batch(client: Client) -> None:
    zombie, newer = Run(client, "zombie"), Run(client, "newer")
    drain = zombie.publication._drain

    def sleep_after(manifest: Any) -> None:
        drain(manifest)
        newer.batch(0, range(100))
        newer.decide_and_die(1, range(100, 200))

    zombie.publication._drain = sleep_after  # type: ignore[method-assign]
    assert zombie.batch(0, range(100))
    Run(client, "last").batch(2, range(200, 300))
    check(client, range(300))


@pytest.mark.parametrize("dies", [False, True])
def test_no_decision_replaces_another(client: Client, dies: bool) -> None:
    """Not even by the same run, whatever Spark should come to do."""
    run = Run(client, "one")
    shares = run.stage(1, range(100, 200))
    ask = run.publication._call_record

    def other_first(script: Script, args: Any) -> Any:
        if script is publication_module.DECIDE:
            run.publication._call_record = ask  # type: ignore[method-assign]
            other = Run(client, "one")
            if dies:
                other.decide_and_die(0, range(100))
            else:
                other.batch(1, range(100, 200))
        return ask(script, args)

    run.publication._call_record = other_first  # type: ignore[method-assign]
    with pytest.raises(StaleOwner):
        run.commit(1, shares)
    Run(client, "next").batch(1, range(100, 200))
    check(client, range(0 if dies else 100, 200))


def test_a_decision_whose_reply_was_lost_may_be_repeated(client: Client) -> None:
    run = Run(client, "one")
    ask = run.publication._call_record

    def twice(script: Script, args: Any) -> Any:
        if script is publication_module.DECIDE:
            ask(script, args)
        return ask(script, args)

    run.publication._call_record = twice  # type: ignore[method-assign]
    assert run.batch(0, range(100))
    check(client, range(100))


def test_a_late_call_does_not_decide_an_attempt_that_was_withdrawn(client: Client) -> None:
    run = Run(client, "one")
    shares = run.stage(0, range(100))
    ask = run.publication._call_record

    def withdraw_first(script: Script, args: Any) -> Any:
        if script is publication_module.DECIDE:
            run.publication._call_record = ask  # type: ignore[method-assign]
            assert run.publication.withdraw(shares)
        return ask(script, args)

    run.publication._call_record = withdraw_first  # type: ignore[method-assign]
    with pytest.raises(StaleOwner):
        run.commit(0, shares)
    run.batch(0, range(100))
    check(client, range(100))


def test_a_zombie_and_a_newer_run_may_both_complete_a_decided_batch(client: Client) -> None:
    zombie, newer = Run(client, "zombie"), Run(client, "newer")
    drain = zombie.publication._drain

    def sleep_first(manifest: object) -> None:
        newer.batch(0, range(9_000), tasks=3)
        newer.batch(1, range(9_000, 9_100))
        drain(manifest)  # type: ignore[arg-type]

    zombie.publication._drain = sleep_first  # type: ignore[method-assign]
    assert zombie.batch(0, range(9_000))
    check(client, range(9_100))


def test_drivers_that_publish_one_decided_batch_at_once_keep_its_order(millstream_url: str, client: Client) -> None:
    Run(client, "killed").decide_and_die(0, range(30_000))
    assert client.execute("HGET", "millstream:{sink:query}:record", "state") == b"decided"

    def restart(name: str) -> None:
        # The calls of each wait for those of all others: on a slow machine for longer than a client waits by default.
        with Client(millstream_url, timeout_ms=round(FAIL_SAFE_S * 1_000)) as own, suppress(StaleOwner):
            Run(own, name).batch(0, range(30_000))

    threads = [threading.Thread(target=restart, args=(f"driver {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAIL_SAFE_S)
    Run(client, "last").batch(1, range(30_000, 30_010))
    check(client, range(30_010), zombies=True)


def test_a_checkpoint_that_was_set_back_is_refused(client: Client) -> None:
    run = Run(client, "one")
    for batch in range(3):
        run.batch(batch, range(batch * 10, batch * 10 + 10))
    with pytest.raises(BatchBehind, match=r"batch 1 comes before batch .* the checkpoint was set back"):
        run.batch(1, range(100, 200))
    numbered = run.stage(1, range(100, 200))
    assert not run.publication.publish(numbered, batch=1, epoch=numbered[0].epoch, before="skip")
    check(client, range(30))


def test_an_aborted_batch_removes_staged_rows_but_not_decided_ones(client: Client) -> None:
    run = Run(client, "one")
    shares = run.stage(0, range(9_000))
    assert run.publication.withdraw(shares)
    assert staged(client) == []
    shares = run.stage(0, range(9_000))
    run.stage = lambda *_: shares  # type: ignore[method-assign]
    run.decide_and_die(0, ())
    assert not Run(client, "one").publication.withdraw(shares)
    Run(client, "next").batch(0, range(9_000))
    check(client, range(9_000))


# --- What Redis does ---


def test_lost_staged_rows_are_an_error_before_anything_is_published(client: Client) -> None:
    run = Run(client, "one")
    shares = run.stage(0, range(9_000))
    client.execute("LPOP", next(key for key in staged(client) if b"{c}" in key))
    with pytest.raises(DataLoss, match="lost staged rows"):
        run.commit(0, shares)
    assert not any(client.execute("EXISTS", stream) for stream in STREAMS)
    run.publication.withdraw(shares)
    assert run.batch(0, range(9_000))
    check(client, range(9_000))


@pytest.mark.parametrize("gone", [b"{c}", b".left."])
def test_lost_decided_rows_are_an_error_and_are_never_skipped(client: Client, gone: bytes) -> None:
    Run(client, "killed").decide_and_die(0, range(9_000))
    client.execute("DEL", *(key for key in staged(client) if gone in key))
    for name in ("next", "one more"):
        with pytest.raises(DataLoss):
            Run(client, name).batch(0, range(9_000))


def test_staged_rows_expire_until_they_are_decided(client: Client) -> None:
    run = Run(client, "one")
    run.stage(5, range(10))
    left = staged(client)
    assert left
    assert all(0 < client.execute("TTL", key) <= 86_400 for key in left)
    Run(client, "two").decide_and_die(6, range(9_000))
    assert {client.execute("TTL", key) for key in staged(client)} == {-1}


def test_a_full_redis_delays_a_batch_while_it_is_staged_and_not_while_it_is_published(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    with Client(millstream_fresh_server.url) as client:
        run = Run(client, "one")
        shares = run.stage(0, range(9_000))
        client.execute("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(OutOfMemory):
            run.task(1, 0, range(10))
        assert run.commit(0, shares)
        client.execute("CONFIG", "SET", "maxmemory", 0)
        run.batch(1, [])
        check(client, range(9_000))


def test_a_key_of_another_type_is_an_error_before_anything_is_published(client: Client) -> None:
    client.execute("SET", "b", "text")
    with pytest.raises(WrongType, match="b holds a string where a stream is needed"):
        Run(client, "one").batch(0, range(100))
    assert client.execute("EXISTS", "a", "c") == 0


def test_a_lost_reply_to_staging_doubles_nothing(client: Client) -> None:
    stage = Stage(client, SINK, "1.0.0.1", patience_ms=0)
    rows = rows_of(range(3_000), ("a",))["a"]
    stage.add([("a", rows[:2_000])], 1)
    with killed_at(1, arrives=True):
        stage.add([("a", rows[2_000:])], 1)
    stage.add([("a", rows[2_000:])], 1)
    share = stage.finish(0, 1)
    assert client.execute("LLEN", staged(client)[0]) == share.parts["a"].chunks == 3


def test_a_task_whose_staged_rows_are_lost_fails_with_data_loss(client: Client) -> None:
    stage = Stage(client, SINK, "1.0.0.1", patience_ms=0)
    rows = rows_of(range(4_000), ("a",))["a"]
    stage.add([("a", rows[:2_000])], 1)
    client.execute("DEL", *staged(client))
    with pytest.raises(DataLoss, match="lost rows that this task has staged"):
        stage.add([("a", rows[2_000:])], 1)
    assert staged(client) == []


def test_one_decision_applies_to_streams_in_all_slots_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_module, "_CALLS_PER_TRIP", 1)
    with cluster() as deployment, Client(deployment.url) as client:
        Run(client, "dead").stage(0, range(3_000))
        Run(client, "killed").decide_and_die(0, range(9_000), trips=2)
        Run(client, "next").batch(0, range(9_000), tasks=3)
        Run(client, "next").batch(1, range(9_000, 9_300))
        check(client, range(9_300))
        assert len({deployment_of(client, stream) for stream in STREAMS}) > 1


def deployment_of(client: Client, key: str) -> int:
    """A number of the node that a key is on."""
    return int(client.execute("CLUSTER", "KEYSLOT", key)) * 3 // 16_384


# --- How entries come into streams ---


def test_any_bytes_are_published_unchanged(client: Client) -> None:
    values = [b"", b"\xff\x00", b"x" * 31, b"y" * 32, b"z" * 70_000, "ü".encode(), bytes(range(256)) * 5]
    stage = Stage(client, SINK, "1.0.0.1", patience_ms=0)
    stage.add([("a", [("*", raw(b"\xfe"), raw(value)) for value in values])], 1)
    Run(client, "one").publication.publish_once([stage.finish(0)])
    assert [items for _, items in client.execute("XRANGE", "a", "-", "+")] == [[b"\xfe", value] for value in values]
    assert client.execute("KEYS", "millstream:{a}*") == []


def test_streams_are_trimmed_as_they_grow(client: Client) -> None:
    exact = WriteOptions(maxlen=10, exact=True)
    Run(client, "one", exact).batch(0, range(9_000))
    assert published(client, "a") == [n for n in range(9_000) if n % 3 == 0][-10:]
    newest = client.execute("XREVRANGE", "a", "+", "-", "COUNT", 1)[0][0]
    Run(client, "two", WriteOptions(minid=newest.decode(), exact=True)).batch(1, range(9_000, 9_003))
    assert published(client, "a") == [8_997, 9_000]
    Run(client, "three", WriteOptions(maxlen=100)).batch(2, range(9_000))
    assert 100 <= client.execute("XLEN", "a") < 300


def test_a_batch_that_overwrites_keeps_groups_and_ids_and_empties_the_stream_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.execute("XADD", "a", "*", "n", -1)
    client.execute("XGROUP", "CREATE", "a", "g", "$")
    run = Run(client, "one", WriteOptions(overwrite=True))
    monkeypatch.setattr(publication_module, "_CALLS_PER_TRIP", 1)
    run.decide_and_die(0, range(9_000), trips=3)
    Run(client, "two", WriteOptions(overwrite=True)).batch(0, range(9_000))
    check(client, range(9_000))
    assert client.execute("XINFO", "GROUPS", "a")
    Run(client, "two", WriteOptions(overwrite=True)).batch(1, range(3))
    check(client, range(3))


def ids(client: Client, token: str, *given: str) -> Stage:
    stage = Stage(client, SINK, token, patience_ms=0)
    stage.add([("a", [(entry_id, "n", "1") for entry_id in given])], 1)
    return stage


def test_rows_with_ids_are_published_by_id_in_any_order_of_tasks(client: Client) -> None:
    shares = [ids(client, "1.0.0.1", "5-9", "5-10").finish(0), ids(client, "1.0.1.2", "4-1", "5-8").finish(1)]
    publication = Run(client, "one").publication
    publication.publish_once(shares)
    assert [entry_id for entry_id, _ in client.execute("XRANGE", "a", "-", "+")] == [b"4-1", b"5-8", b"5-9", b"5-10"]
    with pytest.raises(OutputError, match="the stream 'a' has reached the id 5-10,"):
        publication.publish_once([ids(client, "1.0.0.3", "5-10", "6-0").finish(0)])
    run = Run(client, "one")
    late = ids(client, token_of(epoch := begin(client, SINK, "one"), 0, 0, 9), "5-10").finish(0, epoch)
    with pytest.raises(OutputError):
        run.commit(0, [late])
    assert publication.withdraw([late]), "it was not decided"
    skipping = Run(client, "one", WriteOptions(skip_existing_ids=True)).publication
    skipping.publish_once([ids(client, "1.0.0.4", "5-10", "6-0").finish(0)])
    assert client.execute("XREVRANGE", "a", "+", "-", "COUNT", 1)[0][0] == b"6-0"
    assert client.execute("XLEN", "a") == 5


def test_an_id_that_another_writer_overtakes_stops_the_batch_until_an_operator_mends_it(client: Client) -> None:
    run = Run(client, "one")
    epoch = begin(client, SINK, "one")
    share = ids(client, token_of(epoch, 0, 0, 9), "5-1", "5-2").finish(0, epoch)
    drain = run.publication._drain

    def overtaken(manifest: Any) -> None:
        client.execute("XADD", "a", "5-1", "n", "-1")
        drain(manifest)

    run.publication._drain = overtaken  # type: ignore[method-assign]
    with pytest.raises(OutputError, match="the stream 'a' has reached the id 5-1,"):
        run.commit(0, [share])
    assert not run.publication.withdraw([share])
    with pytest.raises(OutputError):
        Run(client, "two").batch(1, range(3))
    Run(client, "three", WriteOptions(skip_existing_ids=True)).batch(1, [])
    assert [entry_id for entry_id, _ in client.execute("XRANGE", "a", "-", "+")] == [b"5-1", b"5-2"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (("5-10", "5-9"), "comes after 5-10"),
        (("5",), "write milliseconds-sequence"),
        (("0-0",), "from 0-1 on"),
        (("05-1",), "write milliseconds-sequence"),
        (("x",), "is not an entry id"),
        ((f"{2**64}-0",), "is beyond Redis' largest entry id"),
    ],
)
def test_ids_that_redis_would_refuse_are_refused_by_the_task(
    client: Client, given: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(OutputError, match=complaint):
        ids(client, "1.0.0.1", *given)


def test_overlapping_ids_of_two_tasks_are_refused_and_freed(client: Client) -> None:
    shares = [ids(client, "1.0.0.1", "5-1", "5-5").finish(0), ids(client, "1.0.1.2", "5-3").finish(1)]
    publication = Run(client, "one").publication
    with pytest.raises(OutputError, match="overlap between partitions"):
        publication.publish_once(shares)
    assert staged(client)
    publication.discard(shares)
    assert staged(client) == []
