"""Every operation of a worker in Redis; also the handler and the stream of the other scenarios."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from millstream import App, Limit, Message, Reject
from millstream.admin.handler_figures import HandlerFigures, add_figures
from millstream.admin.server_checks import warn_of_data_loss
from millstream.clock import SYSTEM_CLOCK
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.consumer_removal import remove_consumers
from millstream.delivery.delayed_messages import DelayedMessages
from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseRelease, queue_of_key
from millstream.delivery.permits import Permits
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.delivery.run_times import report_run_times
from millstream.errors import ConfigError
from millstream.handlers.dead_letter import DeadLetter
from millstream.handlers.encoding import pack_output
from millstream.handlers.handler import Handler
from millstream.handlers.limits import Share
from millstream.partitions.key_migration import KeyMigration
from millstream.partitions.partitions import Partitions
from millstream.producer.producer import Producer
from millstream.producer.schedule_loop import ScheduleLoop
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import EDITED_FIELD, REDRIVE_FIELD, HandlerKeys, worker_name_key
from millstream.worker import ReadingLoop
from millstream.worker.delayed_mover import TrackedDelayedMessages
from millstream.worker.fetching.ready_streams_fetcher import ReadyStreams
from millstream.worker.incarnations import Incarnation, ProcessEnd
from millstream.worker.ordering.by_partition import ByPartition
from millstream.worker.static_membership import StaticMembership
from tests.support.clocks import ManualClock
from tests.support.partition_fixtures import BASE, Publisher, Worker, growth_killed_after, moved_key
from tests.support.running_codes import CODE, RUNS
from tests.support.waiting import eventually

KEYS = HandlerKeys("shop", "bill", "orders")


def add(admin: Client, count: int, stream: str = "orders") -> list[bytes]:
    return [admin.execute("XADD", stream, "*", "n", n) for n in range(count)]


def letter() -> DeadLetter:
    return DeadLetter(
        stream="orders",
        id="1-1",
        pairs=[b"n", b"1"],
        key=None,
        app="shop",
        handler="bill",
        attempts=1,
        reason="failed",
        error="no",
        time_ms=0,
    )


def resend(admin: Client, keys: HandlerKeys, entry_id: bytes) -> None:
    """Add a dead letter whose edited copy this entry is."""
    letter_id = admin.execute("XADD", keys.dead_letters, "*", *letter().items())
    admin.execute("HSET", keys.resent, entry_id, letter_id, b"l" + letter_id, entry_id)


def reliable(client: Client, name: str = "w-0") -> ReliableStream:
    return ReliableStream(client, "orders", app="shop", handler="bill", consumer=name, into="out")


def work(url: str, admin: Client) -> None:
    """Every operation of a worker without a key."""
    add(admin, 8)
    with Client(url) as client:
        warn_of_data_loss(client)
        names = StaticMembership(client, "shop", "w", handlers={"bill": CODE})
        names.acquire(1)
        names.record_end("t-1", ProcessEnd(died=True, cause=""))
        names.release()
        admin.execute(
            "SET", worker_name_key("shop", "gone-0"), "whoever", "PX", 3_600_000
        )  # as if the clock of Redis had gone back
        with suppress(ConfigError):
            StaticMembership(client, "shop", "gone", clock=ManualClock()).acquire(1)
        assert client.scan_streams("orders*") == ["orders"]
        app = App("shop")
        app.handler("orders", name="bill")(lambda message: None)
        ready = ReadyStreams(client, app.handlers["bill"])
        ready.put("orders")
        ready.publish()
        assert ready.receive(10) == ["orders"]
        stream = reliable(client)
        stream.join()
        admin.execute("XGROUP", "CREATECONSUMER", "orders", KEYS.group, "gone")
        stream.consumer_idle_ms = 0
        assert stream.remove_idle_consumers() == ["gone"]
        remove_consumers(client, [stream])
        stream.refresh()
        stream.reserve_rate(1_000.0, 7, None)
        found = stream.fetch(count=7)
        commit_copy(admin, stream, found[0])
        assert stream.ack(found[1]) == []
        assert stream.dead_letter((found[2], letter())) == []
        stream.begin_isolation(found[3], "t-0 w-9")
        assert Incarnation(client, SYSTEM_CLOCK, app="shop", consumer="w").end_of("t-0 w-9") is None
        stream.end_isolation(found[3:4])
        stream.record_failures(found[3:4])
        assert stream.renew_claims([found[3].id]) == []
        stream.checkpoint()
        found[3].attempt = 2
        assert stream.ack(found[3]) == []  # it is incomplete, and has a crash count
        admin.execute("XGROUP", "DESTROY", "orders", KEYS.group)
        stream.join()  # recreates the group, with the incomplete entries
        admin.execute("XDEL", "orders", found[4].id)
        assert [one.id for one in stream.claim_idle()] == [found[5].id, found[6].id]
        admin.execute("HDEL", KEYS.meta, "owner")
        taken_over = reliable(client)
        taken_over.join()  # from Spark, which has committed one entry beyond its committed id
        beyond = add(admin, 1)[0]
        admin.execute("HSET", KEYS.offsets, b"i" + beyond, beyond)
        taken_over.join()
        assert beyond not in [one.id for one in taken_over.fetch(count=100)]
        taken_over.trim()
        report_and_read_figures(client)
        move_a_delayed_message(client, admin)
        publish_a_firing(client)
        work_by_keys(client, admin)
        work_on_partitions(client, admin)


def commit_copy(admin: Client, stream: ReliableStream, delivery: Delivery) -> None:
    """Commit an entry that is the edited copy of a dead letter, with an output."""
    resend(admin, KEYS, delivery.id)
    effects = stream.effects_of(delivery)
    effects.outputs = [pack_output({"n": 1})]
    effects.add_copy(delivery.id.decode())
    assert stream.commit([effects]) == []


def report_and_read_figures(client: Client) -> None:
    """What a worker reports for operators, and its supervisor reads for its metrics."""
    report_run_times(client, "shop", "bill", RUNS)
    report_run_times(client, "shop", "bill", None, earlier=RUNS)
    read_figures(client)


def read_figures(client: Client) -> None:
    """What a supervisor reads for its metrics."""
    add_figures(client, [KEYS], HandlerFigures(), SYSTEM_CLOCK)


def keyed(client: Client, name: str = "w-0") -> KeyedStream:
    """One key queue for every two entries with even numbers, and one for each other entry."""

    def queue_of(entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
        number = int(pairs[-1])
        return queue_of_key(None if number % 2 else str(number // 4).encode(), entry_id)

    return KeyedStream(client, "orders", queue_of=queue_of, app="shop", handler="bill", consumer=name, into="out")


def lease_one(stream: KeyedStream) -> KeyLease:
    return stream.lease_keys(queues=1, entries=10, run=10, lease_ms=60_000, now_ms=0).leases[0]


def work_by_keys(client: Client, admin: Client) -> None:
    """Every operation of a worker for a handler with a key, which first takes over from workers of another kind."""
    stream = keyed(client)
    stream.join()
    add(admin, 6)
    client.execute("XREAD", "COUNT", 1, "STREAMS", "orders", "0")
    while stream.enqueue_new(count=100, max_pending=100):
        stream.trim()
    assert client.execute("BLPOP", KEYS.notify, 1) is not None
    leases = [lease_one(stream) for _ in range(4)]
    assert stream.renew_leases(leases, 60_000, 0) == []
    take_permits(client, KEYS)
    unit = stream.key_effects_of(leases[0], [leases[0].queued[0]])
    unit.state, unit.outputs, unit.dead_letters = b"\x80", [pack_output({"n": 1})], [letter().items()]
    unit.clear_crash_counts("0-1")
    unit.add_timers([(b"timer", 1_000, pack_output({"n": 1})), (b"timer", "", b"")])
    unit.cancels = leases[0].queued[0].id.decode()
    unit.unfinished = len(leases[0].queued) - 1
    assert stream.commit([unit], call_number=stream.new_call_number()) == []
    releases = [LeaseRelease(leases[1], "limit", b"", 1), LeaseRelease(leases[3], "return")]
    assert stream.release_leases([*releases, LeaseRelease(leases[2], "move", leases[3].queue)]) == []
    assert lease_one(stream).queue == leases[3].queue
    again = keyed(client)
    again.join()
    assert again.recover_leases([], run=10)[0] == 1
    lease = lease_one(again)
    report_and_read_figures(client)
    admin.execute("ZADD", KEYS.leases, 1, lease.queue)
    admin.execute("XDEL", "orders", lease.queued[0].id)
    lease_one(again)
    admin.execute("XGROUP", "DESTROY", "orders", KEYS.group)
    again.enqueue_new(count=1, max_pending=1)
    reliable(client).join()


def take_permits(client: Client, keys: HandlerKeys) -> None:
    """Reach a limit, of single messages and of a rate, and return permits."""
    store = CommitStore(client, app=keys.app, handler=keys.handler, token=1 << 60)
    permits = Permits(Limit(at_once=1, rate="60/s"), 60_000)
    share = Share(b"", 1.0)
    assert permits.take(store, keys.stream, b"kA", share, b"1 w 1-1") == 0
    assert permits.take(store, keys.stream, b"kB", share, b"2 w 2-1") > 0
    permits.give_back(store, keys.stream, share, b"1 w 1-1")


def work_on_partitions(client: Client, admin: Client) -> None:
    """Every operation of a worker during key migration: one key has messages and a state in its old partition."""
    worker = Worker(client, app="shop", handler="bill")
    layout = Partitions(client, BASE).require()
    key = moved_key(layout, 4)
    publisher, sent = Publisher(admin), defaultdict[str, list[int]](list)
    publisher.publish(sent, key)
    worker.work()
    publisher.publish(sent, key)
    layout = Partitions(admin, BASE).grow(4)
    publisher.publish(sent, key)
    worker.refresh()
    worker.route(layout.partition_of(key.encode()))
    worker.work()
    assert KeyMigration(admin, worker.moves.partition_map, app="shop", handler="bill").undrained() == []
    assert growth_killed_after(admin, 1, 6)
    app = App("shop")
    app.handler(BASE, name="bill", key="k", partitions=2)(lambda message: None)
    side = ReadingLoop(app.handlers["bill"], client.url, consumer="w-0")._ordering
    assert isinstance(side, ByPartition)
    side.discover(client)
    old = layout.stream(layout.owners(key.encode())[0])
    resend(admin, HandlerKeys("shop", "bill", old), b"1-0")
    pairs = [REDRIVE_FIELD, b"shop.bill", b"k", key.encode(), EDITED_FIELD, b"ann"]
    assert side._forward(old, key.encode(), b"1-0", pairs)
    side.close()


def move_a_delayed_message(client: Client, admin: Client) -> None:
    for delayed in (DelayedMessages(client), TrackedDelayedMessages(client, SYSTEM_CLOCK)):
        with Producer(admin) as producer:
            producer.publish("orders", {"n": 1}, delay_ms=1)
        eventually(partial(moves_one, delayed), "the message to be due")


def publish_a_firing(client: Client) -> None:
    app = App("shop")
    app.every("1s", stream="orders", name="tick")(lambda: {"n": 1})
    loop = ScheduleLoop(client, app.schedules["tick"], threading.Event())
    length = client.execute("XLEN", "orders")

    def has_fired() -> bool:
        loop.publish_due()
        return bool(client.execute("XLEN", "orders") > length)

    eventually(has_fired, "a firing")


def moves_one(delayed: DelayedMessages) -> bool:
    return delayed.move_due(["orders"]).moved == 1


def handler_for(streams: tuple[str, ...] = ("orders",)) -> Handler:
    app = App("shop")

    @app.handler(*streams, into="out", name="bill")
    def bill(message: Message) -> dict[str, str]:
        if message.text("n") == "3":
            raise Reject("no threes")
        return {"n": message.text("n") or ""}

    return app.handlers["bill"]
