"""The figures that are read from Redis: what they are, at what cost, and what an autoscaler gets."""

import json
import re
import threading
import time
from pathlib import Path

import pytest

from millstream import App, Message
from millstream.admin.redis_metrics import Places, RedisMetrics, all_places, places_of
from millstream.balancer import announce
from millstream.clock import SYSTEM_CLOCK
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import ConfigError
from millstream.observability import metrics as m
from millstream.observability.metrics import Recorder
from millstream.observability.metrics_and_health_server import HealthServer
from millstream.partitions.partitions import Partitions
from millstream.producer.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from tests.support.clocks import ManualClock
from tests.support.keyed_fixtures import keys_in_each_state
from tests.support.service_process import get
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.worker, pytest.mark.keys]

PAY = HandlerKeys("shop", "pay", "orders")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def reader(client: Client, recorder: Recorder, places: Places | None = None) -> RedisMetrics:
    return RedisMetrics(client, all_places if places is None else lambda _: places, recorder)


def scale(figures: RedisMetrics, handler: str) -> tuple[int, dict[str, object]]:
    status, body = figures.scale_page({"handler": handler})
    return status, json.loads(body)


def work(client: Client) -> ReliableStream:
    stream = ReliableStream(client, "orders", app="shop", handler="pay", consumer="w-0")
    stream.join()
    return stream


def test_keys_are_counted_by_state_with_the_wait_of_the_oldest(fresh_client: Client, recorder: Recorder) -> None:
    keys_in_each_state(fresh_client)
    reader(fresh_client, recorder).read_all()
    for state in ("ready", "leased", "backing_off", "parked"):
        assert recorder.value(m.KEYS, handler="shop.pay", state=state) == 1, state
        assert 0 < recorder.value(m.OLDEST_KEY, handler="shop.pay", state=state) < 600, state
    assert recorder.value(m.LOOK_AHEAD_USED, handler="shop.pay") == 11 / 1_000


def test_messages_in_key_queues_count_as_waiting_though_the_lag_of_redis_is_zero(
    fresh_client: Client, recorder: Recorder
) -> None:
    fresh_client.execute("XADD", "orders", "*", "key", "a", "n", 9)  # Redis knows no lag where a stream was empty
    keys_in_each_state(fresh_client)
    (group,) = fresh_client.execute("XINFO", "GROUPS", "orders")
    assert group[group.index(b"lag") + 1] == 0
    fresh_client.execute("XADD", "orders", "*", "key", "e", "n", 0)
    figures = reader(fresh_client, recorder)
    figures.read_all()
    assert recorder.value(m.LAG, handler="shop.pay") == 13
    status, answer = scale(figures, "shop.pay")
    oldest_s = answer.pop("oldest_age_s")
    assert isinstance(oldest_s, float)
    assert 0 < oldest_s < 600
    assert answer == {"handler": "shop.pay", "waiting": 13, "keys_ready": 1, "in_flight": 2, "paused": False}
    assert status == 200


def test_unread_and_pending_messages_count_as_waiting_without_a_key(fresh_client: Client, recorder: Recorder) -> None:
    stream = work(fresh_client)
    fresh_client.pipeline([("XADD", "orders", "*", "n", n) for n in range(7)])
    found = stream.fetch(count=3)
    assert stream.ack(found[0]) == []
    figures = reader(fresh_client, recorder)
    figures.read_all()
    _, answer = scale(figures, "shop.pay")
    assert (answer["waiting"], answer["in_flight"], answer["keys_ready"]) == (6, 2, 0)
    assert recorder.value(m.LAG, handler="shop.pay") == 6


def test_a_lag_that_redis_does_not_know_is_counted_and_trimmed_entries_do_not_count(
    fresh_client: Client, recorder: Recorder
) -> None:
    stream = work(fresh_client)
    ids = fresh_client.pipeline([("XADD", "orders", "*", "n", n) for n in range(20)])
    for one in stream.fetch(count=2):
        assert stream.ack(one) == []
    fresh_client.execute("XDEL", "orders", ids[10])
    (group,) = fresh_client.execute("XINFO", "GROUPS", "orders")
    assert group[group.index(b"lag") + 1] is None
    figures = reader(fresh_client, recorder)
    figures.read_all()
    assert recorder.value(m.LAG, handler="shop.pay") == 17
    fresh_client.execute("XTRIM", "orders", "MAXLEN", 4)
    figures.read_all()
    assert recorder.value(m.LAG, handler="shop.pay") == 4
    assert recorder.value(m.OLDEST_MESSAGE, handler="shop.pay") > 0


def test_dead_letters_are_counted_by_reason_and_unreadable_or_old_ones_as_other(
    fresh_client: Client, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = work(fresh_client)
    fresh_client.pipeline([("XADD", "orders", "*", "n", n) for n in range(120)])
    for n, one in enumerate(stream.fetch(count=120)):
        letter = stream.new_dead_letter(one, reason="failed" if n < 100 else "rejected", error="no")
        assert stream.dead_letter((one, letter)) == []
    fresh_client.execute("XADD", PAY.dead_letters, "*", "no", "letter")
    figures = reader(fresh_client, recorder)

    def lying() -> tuple[float, ...]:
        figures.read_all()
        return tuple(
            recorder.value(m.DEAD_LETTERS, handler="shop.pay", reason=reason)
            for reason in ("failed", "rejected", "crashed", "other")
        )

    assert lying() == (100, 20, 0, 1)
    monkeypatch.setattr("millstream.admin.handler_figures._MOST_LETTERS", 50)
    assert lying() == (29, 20, 0, 72)
    fresh_client.execute("DEL", PAY.dead_letters)
    assert lying() == (0, 0, 0, 0)


def test_delayed_messages_and_a_pause_are_shown(fresh_client: Client, recorder: Recorder) -> None:
    work(fresh_client)
    with Producer(fresh_client) as producer:
        producer.publish("orders", {"n": 1}, delay_ms=3_600_000)
    figures = reader(fresh_client, recorder)
    figures.read_all()
    assert recorder.value(m.DELAYED, handler="shop.pay") == 1
    assert recorder.value(m.PAUSED, handler="shop.pay") == 0
    CommitStore(fresh_client, app="shop", handler="pay").set_paused(["orders"], paused=True)
    figures.read_all()
    assert recorder.value(m.PAUSED, handler="shop.pay") == 1
    assert scale(figures, "shop.pay")[1]["paused"] is True


def test_the_figures_of_a_handler_show_when_they_were_last_read(fresh_client: Client, recorder: Recorder) -> None:
    work(fresh_client)
    figures = reader(fresh_client, recorder)
    for _ in range(2):
        before_s = time.time()
        figures.read_all()
        assert before_s <= recorder.value(m.REDIS_READ_AT, handler="shop.pay") <= time.time()


def test_the_figures_of_a_handler_are_the_sums_over_its_streams(
    fresh_client: Client, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.admin.redis_metrics.AT_ONCE", 7)
    names = [f"s{n}" for n in range(30)]
    fresh_client.pipeline([("XADD", name, "*", "n", 1) for name in names])
    fresh_client.execute("SET", "no-stream", "x")
    places = [HandlerKeys("shop", "pay", name) for name in (*names, "no-stream", "gone")]
    figures = reader(fresh_client, recorder, {"shop.pay": places})
    figures.read_all()
    assert recorder.value(m.LAG, handler="shop.pay") == 30


def test_the_cost_of_a_reading_does_not_grow_with_the_keys(fresh_client: Client, recorder: Recorder) -> None:
    def commands(keys: int) -> int:
        fresh_client.execute("FLUSHALL")
        fresh_client.execute("HSET", PAY.meta, "owner", "keyed", "look_ahead", 100_000)
        fresh_client.execute("XADD", "orders", "*", "n", 1)
        fresh_client.execute("XGROUP", "CREATE", "orders", PAY.group, "0")
        for at in range(0, keys, 1_000):
            fresh_client.execute("RPUSH", PAY.ready, *(f"k{n}" for n in range(at, at + 1_000)))
            fresh_client.execute("ZADD", PAY.backoff, *(part for n in range(at, at + 1_000) for part in (n, f"b{n}")))
            fresh_client.execute(
                "HSET", PAY.parked, *(part for n in range(at, at + 1_000) for part in (f"p{n}", "1 x"))
            )
        fresh_client.execute("CONFIG", "RESETSTAT")
        reader(fresh_client, recorder, {"shop.pay": [PAY]}).read_all()
        counted: bytes = fresh_client.execute("INFO", "stats")
        (line,) = (line for line in counted.splitlines() if line.startswith(b"total_commands_processed:"))
        return int(line.partition(b":")[2])

    few, many = commands(1_000), commands(20_000)
    assert recorder.value(m.KEYS, handler="shop.pay", state="parked") == 20_000
    assert many <= few + 400, "at most a hundred keys of each state are looked at"


def test_a_reading_of_very_many_streams_pauses_nine_times_as_long_as_it_reads(
    fresh_client: Client, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.admin.redis_metrics.AT_ONCE", 5)
    clock, rests = ManualClock(), []

    def read(*args: object) -> None:
        clock.sleep_ms(1_000)

    class Stopping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            rests.append(timeout)
            return False

    monkeypatch.setattr("millstream.admin.redis_metrics.add_figures", read)
    places = [HandlerKeys("shop", "pay", f"s{n}") for n in range(12)]
    RedisMetrics(fresh_client, lambda _: {"shop.pay": places}, recorder, clock=clock).read_all(Stopping())
    assert rests == [9, 9, 9]


def test_no_figures_are_shown_while_redis_cannot_be_read(
    millstream_fresh_server: EmbeddedServer, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(millstream_fresh_server.url) as client, Client("redis://127.0.0.1:1/0") as nowhere:
        keys_in_each_state(client)
        figures = reader(client, recorder)
        assert scale(figures, "shop.pay")[0] == 503
        figures.read_all()
        assert recorder.value(m.REDIS_UP) == 1
        names = {family.name for family in recorder.collect() if family.samples}
        assert "millstream_keys" in names
        figures._client = nowhere
        figures._known._due_ms = 0
        figures.read_all()
        figures.read_all()
    assert {family.name for family in recorder.collect() if family.samples} == {"millstream_redis_up"}
    assert recorder.value(m.REDIS_UP) == 0
    status, answer = scale(figures, "shop.pay")
    assert status == 503
    assert "cannot be reached" in str(answer["error"])
    assert caplog.text.count("cannot read the figures of handlers") == 1


def test_the_value_that_the_page_on_scaling_names_is_a_number_in_the_answer(
    fresh_client: Client, recorder: Recorder
) -> None:
    keys_in_each_state(fresh_client)
    figures = reader(fresh_client, recorder)
    figures.read_all()
    page = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
    paths = set(re.findall(r'url: "http://exporter:9464(/scale\?handler=)shop\.\w+"', page))
    locations = re.findall(r'valueLocation: "(\w+)"', page)
    assert (len(paths), len(locations)) == (1, 3)
    with HealthServer(None, recorder, pages={"/scale": figures.scale_page}) as server:
        answer = get(f"{server.url}{paths.pop()}shop.pay")
        refused = get(f"{server.url}/scale")
    assert answer.headers["content-type"] == "application/json"
    assert {name: answer.json()[name] for name in locations} == {"waiting": 11, "keys_ready": 1, "in_flight": 2}
    assert set(re.findall(r'"(\w+)":', page.partition("curl")[2].partition("```")[0])) == answer.json().keys()
    assert refused.status_code == 404


def test_an_error_of_one_reading_does_not_end_the_readings(fresh_client: Client, recorder: Recorder) -> None:
    def discover(found: Client) -> Places:
        raise ConfigError("two generations of partitions")

    figures = RedisMetrics(fresh_client, discover, recorder)
    figures.read_all()
    assert recorder.value(m.REDIS_UP) == 0
    assert scale(figures, "shop.pay") == (503, {"error": "two generations of partitions"})


def test_an_unknown_handler_is_refused_with_the_names_of_the_others(fresh_client: Client, recorder: Recorder) -> None:
    keys_in_each_state(fresh_client)
    figures = reader(fresh_client, recorder)
    figures.read_all()
    assert scale(figures, "shop.nay") == (404, {"error": "give ?handler=APP.HANDLER, one of: shop.pay"})
    fresh_client.execute("FLUSHALL")
    figures._known._due_ms = 0
    figures.read_all()
    assert scale(figures, "shop.pay")[0] == 404
    assert not [family for family in recorder.collect() if family.samples and family.name == "millstream_keys"]


def test_the_streams_of_an_app_are_found_for_every_kind_of_handler(fresh_client: Client) -> None:
    app = App("shop")

    def handle(message: Message) -> None:
        """Do nothing."""

    app.handler("a", "b", name="named")(handle)
    app.handler(pattern="orders.*", name="matching")(handle)
    app.handler("base", name="spread", key="k", partitions=2)(handle)
    app.handler(announced="calls", name="announced", order="stream")(handle)
    fresh_client.execute("XADD", "orders.1", "*", "n", 1)
    Partitions(fresh_client, "base").create(2)
    announce(fresh_client, "calls", "call:1")
    found = {
        label: [keys.stream for keys in places]
        for label, places in places_of(fresh_client, app.handlers.values()).items()
    }
    assert found == {
        "shop.named": ["a", "b"],
        "shop.matching": ["orders.1"],
        "shop.spread": ["{base.0}", "{base.1}"],
        "shop.announced": [],  # announced, and no consumer has read it yet
    }


def test_the_metrics_are_read_until_they_are_stopped(fresh_client: Client, recorder: Recorder) -> None:
    keys_in_each_state(fresh_client)
    stopping, read = threading.Event(), threading.Event()

    def discover(found: Client) -> Places:
        if recorder.value(m.REDIS_UP):
            read.set()
        return all_places(found)

    figures = RedisMetrics(fresh_client, discover, recorder, every_ms=1, clock=SYSTEM_CLOCK)
    thread = threading.Thread(target=figures.run, args=(stopping,))
    thread.start()
    assert read.wait(FAIL_SAFE_S)
    stopping.set()
    thread.join(FAIL_SAFE_S)
    assert not thread.is_alive()
