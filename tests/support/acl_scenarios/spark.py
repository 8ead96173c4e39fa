"""Every operation of a run on Spark in Redis: batches, deferred messages, and key migration."""

import threading
from collections import defaultdict

from millstream import App
from millstream.admin.server_checks import warn_of_data_loss
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.deferral import Deferral, defer, deferred_keys, read_queue, runnable_keys
from millstream.delivery.effects import FROM_QUEUE, Effects
from millstream.delivery.query_progress import QueryProgress, report_progress
from millstream.delivery.running_code import report_code
from millstream.handlers.encoding import pack_output
from millstream.model import EntryId
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import EDITED_FIELD, REDRIVE_FIELD, HandlerKeys
from millstream.redis_client.pipelining import server_time_us
from millstream.spark.engine.key_migration import PartitionMigration, keep_migrating
from tests.support.acl_scenarios.worker import (
    KEYS,
    add,
    handler_for,
    keyed,
    letter,
    move_a_delayed_message,
    publish_a_firing,
    read_figures,
    reliable,
    resend,
    take_permits,
)
from tests.support.partition_fixtures import BASE, Publisher, moved_key
from tests.support.running_codes import CODE
from tests.support.waiting import eventually


def effects_on(admin: Client, entry_id: str) -> Effects:
    """All kinds of effects of one message, which is the edited copy of a dead letter, too."""
    resend(admin, KEYS, entry_id.encode())
    letters = [letter().items()]
    unit = Effects(
        b"kA", b"", b"A", b"\x80", cleared_counts=[entry_id], outputs=[pack_output({"n": 1})], dead_letters=letters
    )
    unit.add_message(entry_id)
    unit.add_copy(entry_id)
    unit.add_timers([(b"timer", 1_000, pack_output({"n": 1})), (b"timer", "", b"")])
    unit.cancels = entry_id
    return unit


def run_on_spark(url: str, admin: Client) -> None:
    """Every operation of a pipeline in Redis, in the driver and in tasks, without Spark itself."""
    from millstream.spark.run.first_start import prepare_new
    from millstream.spark.run.liveness import announce_run, replaced_names, withdraw_run
    from millstream.spark.source.batch_planner import BatchPlanner
    from millstream.spark.source.options import parse
    from millstream.spark.source.progress_group import ProgressGroup
    from tests.support.planning import planned_end

    ids = add(admin, 30)
    with Client(url) as client:
        warn_of_data_loss(client)
        epoch = server_time_us(client)
        announce_run(client, "shop", ["bill"], epoch=epoch)
        report_code(client, "shop", {"bill": CODE})
        report_progress(client, "shop", {"bill": QueryProgress()})
        assert replaced_names(client, "shop", ["bill"], epoch=epoch) == set()
        withdraw_run(client, "shop", ["bill"], epoch=epoch, running={"bill": CODE})
        handler = handler_for()
        prepare_new(client, handler, ["orders"], "cp", start="resume", start_at="latest")
        prepare_new(client, handler, ["orders"], "cp", start="reprocess", start_at="earliest")
        options = parse(
            {
                "url": url,
                "subscribePattern": "orders*",
                "committedApp": "shop",
                "committedHandler": "bill",
                "group": KEYS.group,
                "startingOffsets": "committed",
            },
            {},
        )
        planner = BatchPlanner(client, options, cores=2)
        start = planner.starting_offsets("earliest")
        ends = planned_end(planner, start, limit=10)
        assert ids[9] == str(ends["orders"].id).encode()
        ProgressGroup(client, KEYS.group).publish(ends)
        store = CommitStore(client, app="shop", handler="bill", into="out")
        store = store.with_token(store.new_token(["orders"]))
        store.begin_run(["orders"])
        assert store.load({"orders": ([b"kA"], [b"A"])}) == {"orders": {}}
        client.execute("XRANGE", "orders", "-", "+", "COUNT", 1)  # as tasks do
        store.set_crash_count("orders", ids[0].decode(), store.crash_count("orders", ids[0].decode()) + 1)
        assert store.commit({"orders": [effects_on(admin, ids[0].decode())]}) == []
        store.advance_committed({"orders": EntryId.parse(ids[9])})
        ProgressGroup(client, KEYS.group).publish(ends)
        stream = reliable(admin)
        stream.join()  # workers take over, commit one of three entries, and their group is destroyed
        found = stream.fetch(count=3)
        stream.ack(found[1])
        stream.checkpoint()
        admin.execute("XGROUP", "DESTROY", "orders", KEYS.group)
        committed_id = store.with_token(store.new_token(["orders"])).begin_run(["orders"])["orders"].committed_id
        assert str(committed_id).encode() == ids[9]
        keyed(admin).join()  # workers of a keyed handler take over, and have entries in key queues
        keyed(admin).enqueue_new(count=4, max_pending=100)
        store.with_token(store.new_token(["orders"])).begin_run(["orders"])
        read_figures(client)
        keep_queues(client, admin, KEYS)
        work_beside_queries(client, admin)


def work_beside_queries(client: Client, admin: Client) -> None:
    """What other threads than those of the queries do: key migration, delayed messages, and schedules."""
    move_keys(client, admin, "shop", "bill")
    move_a_delayed_message(client, admin)
    publish_a_firing(client)


def keep_queues(client: Client, admin: Client, keys: HandlerKeys) -> None:
    """Defer messages, find the runnable keys, drain one key queue, and park another."""
    ids = [one.decode() for one in admin.pipeline([("XADD", keys.stream, "*", "n", n) for n in range(4)])]
    store = CommitStore(client, app=keys.app, handler=keys.handler, keyed=True)
    store = store.with_token(store.new_token([keys.stream]))
    store.begin_run([keys.stream])
    take_permits(client, keys)
    deferrals = [
        Deferral(queue=b"kX", expected_offset=b"", mode="backoff", detail=0, failed_attempts=1, ids=ids[:2]),
        Deferral(queue=b"kY", expected_offset=b"", mode="limit", detail=b"", failed_attempts=1, ids=ids[2:]),
    ]
    assert defer(store, keys.stream, deferrals) == []
    assert deferred_keys(store, keys.stream, [b"kX", b"kZ"]) == {b"kX"}
    ready = [b"kX", b"kY"]
    eventually(lambda: sorted(runnable_keys(store, [keys.stream], 10)[keys.stream].queues) == ready, "both to be ready")
    assert [one for one, _ in read_queue(client, keys, b"kX", 10).entries] == ids[:2]
    unit = Effects(b"kX", FROM_QUEUE)
    for one in ids[:2]:
        unit.add_message(one)
    assert store.commit({keys.stream: [unit]}) == []
    parked = Deferral(
        queue=b"kY", expected_offset=FROM_QUEUE, mode="park", detail="why", failed_attempts=2, ids=ids[2:3]
    )
    assert defer(store, keys.stream, [parked]) == []
    assert runnable_keys(store, [keys.stream], 10)[keys.stream].queues == []


def move_keys(client: Client, admin: Client, app: str, handler: str) -> None:
    """Let a key wait in a new partition until its old one is drained, and forward a redriven dead letter."""
    made = App(app)
    made.handler(BASE, name=handler, key="k", partitions=2)(lambda message: None)
    compiled = made.handlers[handler]
    publisher = Publisher(admin)
    old = Partitions(admin, BASE).create(2)
    key = moved_key(old, 4)
    publisher.publish(defaultdict(list), key)
    layout = Partitions(admin, BASE).grow(4)
    store = CommitStore(client, app=app, handler=handler, keyed=True)
    store = store.with_token(store.new_token(layout.streams))
    store.begin_run(layout.streams)
    home = layout.stream(layout.partition_of(key.encode()))
    moves = PartitionMigration(client, compiled)
    moves.await_keys(home, [b"k" + key.encode()])
    new = admin.execute("XADD", home, "*", "k", key).decode()
    assert defer(store, home, [Deferral(queue=b"k" + key.encode(), expected_offset=b"", ids=[new])]) == []
    pairs = [REDRIVE_FIELD, f"{app}.{handler}".encode(), b"k", key.encode(), EDITED_FIELD, b"ann"]
    former = old.stream(old.partition_of(key.encode()))
    resend(admin, HandlerKeys(app, handler, former), b"1-0")
    assert moves.forward(former, key.encode(), "1-0", pairs)
    for stream in old.streams:
        last = admin.execute("XREVRANGE", stream, "+", "-", "COUNT", 1)
        admin.execute("HSET", HandlerKeys(app, handler, stream).meta, "committed_id", last[0][0] if last else "0-0")
        admin.execute("HSET", HandlerKeys(app, handler, stream).state, key, b"\x80")
    over = threading.Event()
    keep_migrating(client, compiled, over, lambda streams: over.set())
