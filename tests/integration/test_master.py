"""The master with consumers that follow the memo to the letter: real processes, real HTTP, real Redis."""

import re
from collections.abc import Iterator

import httpx
import pytest

from millstream.admin.key_queues import park
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.invariants import check_invariants
from tests.support.commandline import call
from tests.support.masters import (
    GROUP,
    KEYS,
    PATIENT,
    STREAM,
    HealthPage,
    Master,
    MemoConsumer,
    holders,
    is_clean,
    is_read,
    publish,
)
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.master, pytest.mark.xdist_group("master")]


@pytest.fixture(scope="module")
def running(millstream_server: EmbeddedServer) -> Iterator[Master]:
    with Master(millstream_server.url, *PATIENT, "--max-body", "2000", "--max-page-size", "5") as found:
        yield found


@pytest.fixture
def master(running: Master, client: Client) -> Master:
    """One master for all tests: Redis is emptied before each of them, under its feet."""
    eventually(lambda: client.execute("EXISTS", KEYS.meta), "a new beginning")
    return running


def test_a_consumer_without_a_client_library_gets_each_ticket_in_order_one_message_at_a_time(
    master: Master, client: Client
) -> None:
    ids = publish(client, "A", "B", "A", "A", "B")
    with MemoConsumer(client, "c1", max_tickets=5).register(master) as consumer:
        got: list[tuple[str, str]] = []
        eventually(lambda: len(consumer.read()) == 2, "both tickets")
        while pending := consumer.read():
            assert len({fields["ticket_id"] for _, fields in pending}) == len(pending), "two messages of one ticket"
            message_id, fields = pending[0]
            got.append((fields["ticket_id"], message_id))
            consumer.finish(master, message_id)
            if len(got) < len(ids):
                consumer.next()
    order = {ticket: [one for key, one in got if key == ticket] for ticket in "AB"}
    assert order == {"A": [ids[0], ids[2], ids[3]], "B": [ids[1], ids[4]]}
    assert is_clean(client)


def test_an_acknowledgement_returns_the_next_message_and_may_be_repeated(master: Master, client: Client) -> None:
    with MemoConsumer(client, "c1").register(master) as consumer:

        def returned() -> bool:
            """Whether the answer has the next message; else the master has given it in between, in its own round."""
            first, second = publish(client, "A", "A")
            assert consumer.next()[0] == first
            eventually(lambda: is_read(client), "both in their line")
            # Without an XACK before: the master might find it first, and give the next one before it is asked.
            answer = consumer.acknowledge(master, first).json()
            assert answer in ({"known": False, "next": [second]}, {"known": False, "next": []})
            assert consumer.finish(master, first) == {"known": True, "next": []}
            assert consumer.next()[0] == second
            consumer.finish(master, second)
            return bool(answer["next"])

        eventually(returned, "an acknowledgement that returns the next message")


def test_several_messages_are_acknowledged_with_one_call(master: Master, client: Client) -> None:
    with MemoConsumer(client, "c1", max_tickets=2).register(master) as consumer:

        def all_returned() -> bool:
            """Whether the answer has both next messages; else the master has given some in its own round."""
            a1, b1, a2, b2 = publish(client, "A", "B", "A", "B")
            eventually(lambda: dict(consumer.read()).keys() == {a1, b1} and is_read(client), "both tickets")
            found = master.post("messages/acknowledge", consumer="c1", message_ids=[a1, b2, "1-1", b1])
            assert found.status_code == 200, found.text
            answer = found.json()
            assert not answer["known"]
            assert set(answer["next"]) <= {a2, b2}
            assert [(one["message_id"], one["status"]) for one in answer["refused"]] == [(b2, 409), ("1-1", 404)]
            again = master.post("messages/acknowledge", consumer="c1", message_ids=[a1, b1]).json()
            assert again == {"known": True, "next": [], "refused": []}
            assert dict(consumer.read()).keys() == {a2, b2}
            for one in (a2, b2):
                consumer.finish(master, one)
            return len(answer["next"]) == 2

        eventually(all_returned, "an acknowledgement that returns both next messages")


def test_a_message_without_a_ticket_waits_for_no_other(master: Master, client: Client) -> None:
    publish(client, "A")
    plain = client.execute("XADD", STREAM, "*", "text", "hello").decode()
    with MemoConsumer(client, "c1", max_tickets=2).register(master) as consumer:
        eventually(lambda: plain in dict(consumer.read()), "the message without a ticket")
        shown = {one["ticket_id"] for one in master.get("tickets")["tickets"]}
        assert shown == {"A", None}


def test_a_consumer_that_skips_a_message_gets_no_newer_one_of_that_ticket(master: Master, client: Client) -> None:
    skipped, other, newer = publish(client, "A", "B", "A")
    with MemoConsumer(client, "c1", max_tickets=2).register(master) as consumer:
        eventually(lambda: len(consumer.read()) == 2, "both tickets")
        consumer.finish(master, other)
        assert dict(consumer.read()).keys() == {skipped}
        eventually(lambda: holders(client).get(newer) == "waiting", "the newer one is in its line")
        consumer.finish(master, skipped)
        assert consumer.next()[0] == newer


def test_an_acknowledgement_out_of_order_does_not_skip_an_earlier_message(master: Master, client: Client) -> None:
    first, second = publish(client, "A", "A")
    with MemoConsumer(client, "c1").register(master) as consumer:
        consumer.next()
        refused = consumer.acknowledge(master, second)
        assert refused.status_code == 409
        assert "does not have" in refused.json()["error"]
        eventually(lambda: list(holders(client)) == [first, second], "both are pending")


def test_an_xack_without_the_call_counts_as_an_acknowledgement(master: Master, client: Client) -> None:
    first, second = publish(client, "A", "A")
    with MemoConsumer(client, "c1").register(master) as consumer:
        assert consumer.next()[0] == first
        consumer.xack(first)
        assert consumer.next()[0] == second
        consumer.finish(master, second)
    assert is_clean(client)


def test_the_call_without_an_xack_acknowledges_in_redis_too(master: Master, client: Client) -> None:
    (only,) = publish(client, "A")
    with MemoConsumer(client, "c1").register(master) as consumer:
        consumer.next()
        assert consumer.acknowledge(master, only).json() == {"known": False, "next": []}
    assert is_clean(client)


def test_messages_that_an_outsider_reads_from_the_group_are_enqueued_again(master: Master, client: Client) -> None:
    with MemoConsumer(client, "c1").register(master) as consumer:
        (running,) = publish(client, "A")
        consumer.next()
        client.execute("MULTI")  # the thief is faster than the master
        publish(client, "A", "B")
        client.execute("XREADGROUP", "GROUP", GROUP, "thief", "COUNT", 10, "STREAMS", STREAM, ">")
        stolen = [one.decode() for one in client.execute("EXEC")[:2]]
        (newest,) = publish(client, "A")
        got = [running]
        consumer.finish(master, running)
        while len(got) < 4:
            message_id, _ = consumer.next()
            got.append(message_id)
            consumer.finish(master, message_id)
        assert [one for one in got if one != stolen[1]] == [running, stolen[0], newest]
    assert is_clean(client)


def test_a_message_that_an_outsider_claims_goes_back_to_its_consumer(master: Master, client: Client) -> None:
    (only,) = publish(client, "A")
    with MemoConsumer(client, "c1").register(master) as consumer:
        consumer.next()
        client.execute("MULTI")  # the master may give it back at once
        client.execute("XAUTOCLAIM", STREAM, GROUP, "thief", 0, "0")
        client.execute("XPENDING", STREAM, GROUP, "-", "+", 10)
        _, ((claimed, thief, *_),) = client.execute("EXEC")
        assert (claimed.decode(), thief) == (only, b"thief")
        eventually(lambda: holders(client) == {only: "c1"}, "it is back")


def test_a_failed_message_is_retried_before_newer_ones_and_becomes_a_dead_letter_in_the_end(
    master: Master, client: Client
) -> None:
    bad, good = publish(client, "A", "A")
    with MemoConsumer(client, "c1").register(master) as consumer:
        outcomes = []
        for _ in range(4):
            assert consumer.next()[0] == bad
            found = master.post("messages/fail", consumer="c1", message_id=bad, error="no such customer")
            outcomes.append(found.json()["outcome"])
        assert outcomes == ["retry", "retry", "retry", "dead-letter"]
        assert consumer.next()[0] == good
    letters = call("dlq", "list", "--json", url=client.url).json_lines()
    assert [(one["id"], one["reason"], one["attempts"]) for one in letters] == [(bad, "failed", 4)]
    assert "no such customer" in str(letters)


def test_a_failure_without_retry_becomes_a_dead_letter_at_once(master: Master, client: Client) -> None:
    (bad,) = publish(client, "A")
    with MemoConsumer(client, "c1").register(master) as consumer:
        consumer.next()
        found = master.post("messages/fail", consumer="c1", message_id=bad, error="nonsense", retry=False)
        assert found.json() == {"outcome": "dead-letter", "next": []}
    assert is_clean(client)


def test_a_released_message_goes_to_another_consumer_at_once_and_counts_no_attempt(
    master: Master, client: Client
) -> None:
    (only,) = publish(client, "A")
    with MemoConsumer(client, "c1").register(master) as leaving, MemoConsumer(client, "c2") as other:
        leaving.next()
        assert master.post("messages/release", consumer="c1").json() == {"released": 1}
        assert master.state_of("c1") is None
        other.register(master)
        assert other.next()[0] == only
        assert client.execute("HLEN", KEYS.crashes) == 0


def test_no_consumer_gets_more_messages_than_it_asked_for(master: Master, client: Client) -> None:
    publish(client, *(f"T{n}" for n in range(20)))
    with (
        MemoConsumer(client, "c1", max_tickets=3).register(master) as three,
        MemoConsumer(client, "c2").register(master) as one,
    ):
        eventually(lambda: len(three.read()) == 3 and len(one.read()) == 1 and is_read(client), "three and one")
        assert sum(name == "waiting" for name in holders(client).values()) == 16


def test_the_tickets_can_be_listed_page_by_page(master: Master, client: Client) -> None:
    ids = publish(client, "A", "B", "C", "A")
    assert park(client, KEYS, b"kD", "no message of it has come yet")
    with MemoConsumer(client, "c1", max_tickets=2).register(master) as consumer:
        eventually(lambda: len(consumer.read()) == 2 and is_read(client), "two tickets")
        pages, cursor = [], ""
        while True:
            page = master.get("tickets", limit=2, **({"cursor": cursor} if cursor else {}))
            pages += page["tickets"]
            cursor = page["cursor"]
            if not cursor:
                break
        shown = {one["ticket_id"]: (one["consumer_name"], one["message_ids"]) for one in pages}
        assert shown == {"A": ("c1", [ids[0], ids[3]]), "B": ("c1", [ids[1]]), "C": (None, [ids[2]])}
        (found,) = master.get("consumers")["consumers"]
        assert (found["consumer_name"], found["health_url"], found["state"]) == ("c1", consumer.health.url, "alive")
        assert (sorted(found["ticket_ids"]), sorted(found["message_ids"])) == (["A", "B"], ids[:2])


def test_a_paused_group_assigns_nothing_until_it_is_resumed(master: Master, client: Client) -> None:
    with MemoConsumer(client, "c1").register(master) as consumer:
        client.execute("HSET", KEYS.meta, "paused", 1)
        paused = f'millstream_paused{{handler="master.{GROUP}"}} 1'
        eventually(lambda: paused in master.http.get("/metrics").text, "the master to know of it")
        publish(client, "A")
        calls = consumer.health.calls
        eventually(lambda: consumer.health.calls > calls + 2, "some rounds")
        assert not consumer.read()
        client.execute("HDEL", KEYS.meta, "paused")
        consumer.next()


def test_the_metrics_count_committed_messages(master: Master, client: Client) -> None:
    (only,) = publish(client, "A")
    with MemoConsumer(client, "c1").register(master) as consumer:
        consumer.next()
        consumer.finish(master, only)
    count = re.compile(rf'^millstream_messages_committed_total{{handler="master.{GROUP}"}} [1-9]', re.MULTILINE)
    eventually(lambda: count.search(master.http.get("/metrics").text), "a committed message")
    assert not check_invariants(client, KEYS, STREAM)


# --- The API ---


def test_requests_are_bounded_and_errors_are_one_line_of_json(master: Master) -> None:
    http = master.http

    def streamed() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    answers = [
        (413, http.post("/api/consumers/register", content=b"x" * 2_001)),
        (413, http.post("/api/consumers/register", content=streamed())),
        (415, http.post("/api/consumers/register", content=b'{"consumer": "c"}')),
        (415, http.post("/api/messages/acknowledge", data={"consumer": "c", "message_id": "1-1"})),
        (422, http.post("/api/consumers/register", content=b"{", headers={"Content-Type": "application/json"})),
        (422, http.post("/api/consumers/register", json={})),
        (422, http.post("/api/consumers/register", json={"consumer": "waiting"})),
        (422, http.post("/api/consumers/register", json={"consumer": "a b"})),
        (422, http.post("/api/consumers/register", json={"consumer": "c", "max_tickets": 1_001})),
        (422, http.post("/api/messages/acknowledge", json={"consumer": "c", "message_id": "nonsense"})),
        (422, http.post("/api/messages/acknowledge", json={"consumer": "c", "message_ids": ["nonsense"]})),
        (422, http.post("/api/messages/acknowledge", json={"consumer": "c"})),
        (404, http.post("/api/messages/acknowledge", json={"consumer": "c", "message_id": "1-1"})),
        (404, http.post("/api/consumers/heartbeat", json={"consumer": "nobody"})),
        (422, http.get("/api/tickets", params={"limit": 6})),
        (422, http.get("/api/tickets", params={"cursor": "xyz"})),
        (404, http.get("/docs")),
        (405, http.get("/api/messages/acknowledge")),
    ]
    for status, answer in answers:
        assert answer.status_code == status, answer.text
        assert list(answer.json()) == ["error"]
        assert answer.json()["error"]
        assert "\n" not in answer.json()["error"]


def test_a_request_without_a_token_or_a_content_type_is_refused_with_the_missing_header(master: Master) -> None:
    body = b'{"consumer": "c"}'
    for path in ("consumers/register", "messages/acknowledge"):
        url = f"{master.url}/api/{path}"
        refused = httpx.post(url, content=body, timeout=FAIL_SAFE_S, trust_env=False)
        assert "`Authorization: Bearer TOKEN`" in refused.json()["error"]
        refused = httpx.post(url, content=body, headers=master.http.headers, timeout=FAIL_SAFE_S, trust_env=False)
        assert "`Content-Type: application/json`" in refused.json()["error"]


def test_the_openapi_document_names_every_call_and_its_token(master: Master) -> None:
    document = master.http.get("/openapi.json").json()
    calls = {f"{method} {path}" for path, methods in document["paths"].items() for method in methods}
    assert calls == {
        "post /api/consumers/register",
        "post /api/consumers/heartbeat",
        "post /api/messages/acknowledge",
        "post /api/messages/fail",
        "post /api/messages/release",
        "get /api/tickets",
        "get /api/consumers",
        "get /api/health",
        "get /metrics",
    }
    assert document["paths"]["/api/messages/acknowledge"]["post"]["security"] == [{"acknowledge": []}]


def test_the_api_behaves_as_the_openapi_document_specifies(master: Master) -> None:
    document = master.http.get("/openapi.json").json()
    name = document["components"]["schemas"]["HeartbeatRequest"]["properties"]["consumer"]
    for text in ("a", "A-z_0.9:@x", "x" * 100, "", "x" * 101, "a b", "ä", "a/b"):
        answer = master.post("consumers/register", consumer=text)
        is_valid = name["minLength"] <= len(text) <= name["maxLength"] and bool(re.search(name["pattern"], text))
        assert is_valid == (answer.status_code == 200), text
    message_id = document["components"]["schemas"]["FailRequest"]["properties"]["message_id"]
    for text, is_valid in (("1-0", True), ("1", True), ("", False), ("-1", False), ("1-", False), ("x", False)):
        assert bool(re.search(message_id["pattern"], text)) == is_valid
        refused = master.post("messages/fail", consumer="a", message_id=text)
        assert (refused.status_code == 422) == (not is_valid), text
    (cursor,) = (one for one in document["paths"]["/api/tickets"]["get"]["parameters"] if one["name"] == "cursor")
    assert master.http.get("/api/tickets", params={"cursor": "zz"}).status_code == 422
    assert not re.search(cursor["schema"]["pattern"], "zz")
    refused = master.http.put("/api/tickets")
    assert (refused.status_code, refused.headers["allow"], list(refused.json())) == (405, "GET", ["error"])
    for path, methods in document["paths"].items():
        for method in methods.values():
            assert {"400", "401", "404", "405", "422", "429", "500", "503"} <= method["responses"].keys(), path


def test_a_second_consumer_of_a_name_is_refused_while_the_first_lives(master: Master, client: Client) -> None:
    publish(client, "A")
    with MemoConsumer(client, "c1").register(master) as first, HealthPage() as other:
        (message_id, _) = first.next()
        refused = master.post("consumers/register", consumer="c1", health_url=other.url)
        assert (refused.status_code, "alive" in refused.json()["error"]) == (409, True)
        assert first.read()[0][0] == message_id


def test_a_registration_of_the_same_consumer_is_a_restart_unless_its_instance_is_another(
    master: Master, client: Client
) -> None:
    publish(client, "A")
    with MemoConsumer(client, "c1", instance="x").register(master) as consumer:
        consumer.next()
        owners = "millstream:{tickets}:tickets:master.workers:owners"
        (token,) = client.execute("HVALS", owners)
        consumer.register(master)
        eventually(lambda: consumer.health.calls > 6, "some rounds")
        assert client.execute("HVALS", owners) == [token]
        body = {"consumer": "c1", "health_url": consumer.health.url, "instance": "y"}
        assert master.post("consumers/register", **body).status_code == 200
        eventually(lambda: client.execute("HVALS", owners) not in ([token], []), "a lease of its new life")
