"""Following streams through `millstream serve`: what comes, from where on, and what is sent when something is missing."""

import json
from collections.abc import Iterator

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.gateways import Server, numbers, publish
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.router, pytest.mark.xdist_group("serve")]


@pytest.fixture(scope="module")
def server(millstream_server: EmbeddedServer) -> Iterator[Server]:
    with Server(millstream_server.url, "--heartbeat", "0.3") as started:
        yield started


@pytest.fixture
def client(millstream_url: str, server: Server) -> Iterator[Client]:
    with Client(millstream_url) as connected:
        yield connected


def test_a_stream_is_followed_as_events_from_its_beginning_or_after_any_id(client: Client, server: Server) -> None:
    ids = publish(client, "orders:1", range(4))
    with server.follow("orders:1", query="after=earliest") as events:
        assert (events.status, events.headers["content-type"]) == (200, "text/event-stream")
        found = events.next(4)
        assert [event.id for event in found] == ids
        assert found[0].data == {"stream": "orders:1", "id": ids[0], "fields": {"n": "0"}}
        assert events.seen.retry_ms
        ids += publish(client, "orders:1", [4])
        assert events.ids(1) == ids[4:]
    with server.follow("orders:1", query=f"after={ids[1]}") as events:
        assert events.ids(3) == ids[2:]


def test_a_client_that_reconnects_gets_the_messages_it_missed_and_none_twice(client: Client, server: Server) -> None:
    ids = publish(client, "s", range(3))
    with server.follow("s", query="after=earliest") as events:
        last = events.next(3)[-1].id
    ids += publish(client, "s", range(3, 8))
    # What the browser sends is newer than what the page wrote into the URL.
    with server.follow("s", query="after=earliest", last_event_id=last) as events:
        assert events.ids(5) == ids[3:]


def test_a_client_that_is_cut_off_before_the_first_message_misses_none(client: Client, server: Server) -> None:
    publish(client, "s", range(3))
    with server.follow("s") as events:
        place = events.wait().last_id
        assert not events.seen.events
    ids = publish(client, "s", range(3, 5))
    with server.follow("s", last_event_id=place) as events:
        assert events.ids(2) == ids


def test_several_streams_on_one_connection_are_resumed_together(client: Client, server: Server) -> None:
    publish(client, "a", [0])
    with server.follow_all(["a", "b:/ ö"]) as events:
        events.wait(places=2)
        publish(client, "a", [1])
        publish(client, "b:/ ö", [2])
        found = events.next(2)
        assert {event.data["stream"]: numbers([event]) for event in found} == {"a": [1], "b:/ ö": [2]}
        place = found[-1].id
    publish(client, "b:/ ö", [3])
    publish(client, "a", [4])
    with server.follow_all(["a", "b:/ ö"], last_event_id=place) as events:
        assert sorted(numbers(events.next(2))) == [3, 4]
    with server.follow_all(["a", "b:/ ö"], query="after=earliest") as events:
        assert sorted(numbers(events.next(5))) == [0, 1, 2, 3, 4]


def test_a_position_of_several_streams_never_passes_the_last_message_sent(client: Client, server: Server) -> None:
    names = [f"s{n}" for n in range(5)]
    ids = {name: publish(client, name, range(200)) for name in names}
    with server.follow_all(names, query="after=earliest") as events:
        sent = dict.fromkeys(names, "0")
        for event in events.next(1_000):
            sent[event.data["stream"]] = event.data["id"]
            assert event.id.split(",") == list(sent.values())
    assert sent == {name: found[-1] for name, found in ids.items()}


def test_any_bytes_of_a_stream_reach_the_client(client: Client, server: Server) -> None:
    client.execute("XADD", "odd\n\u2028/%?", "*", b"a\xff", b"\x00\xfe", "t", "line\nid: 9-9\n\nb", "t", "ä")
    with server.follow("odd\n\u2028/%?", query="after=earliest") as events:
        [event] = events.next()
    assert event.data["stream"] == "odd\n\u2028/%?"
    assert event.data["pairs"] == [[{"hex": "61ff"}, {"hex": "00fe"}], ["t", "line\nid: 9-9\n\nb"], ["t", "ä"]]
    assert event.id == event.data["id"]


def test_a_websocket_carries_the_same_messages_as_json(client: Client, server: Server) -> None:
    ids = publish(client, "s", range(3))
    with server.socket("s", "after=earliest") as socket:
        found = [json.loads(socket.recv(FAIL_SAFE_S)) for _ in range(3)]
        assert found[0] == {
            "event": "message",
            "stream": "s",
            "id": ids[0],
            "fields": {"n": "0"},
            "position": ids[0],
        }
        assert [frame["id"] for frame in found] == ids
        socket.send("whatever a client says means nothing")
        ids += publish(client, "s", [3])
        assert json.loads(socket.recv(FAIL_SAFE_S))["id"] == ids[3]
    with server.socket("s") as socket:
        start = json.loads(socket.recv(FAIL_SAFE_S))
        assert start == {"event": "start", "stream": "s", "position": ids[3]}
    ids += publish(client, "s", [4])
    with server.socket("s", f"after={start['position']}") as socket:
        assert json.loads(socket.recv(FAIL_SAFE_S))["id"] == ids[4]


def test_entries_trimmed_before_they_were_read_are_sent_as_a_gap(client: Client, server: Server) -> None:
    ids = publish(client, "s", range(5))
    client.execute("XTRIM", "s", "MINID", ids[3])
    with server.follow("s", query=f"after={ids[0]}") as events:
        gap, *messages = events.next(3)
    assert (gap.kind, gap.data["reason"], gap.data["after"]) == ("gap", "trimmed", ids[0])
    assert [event.id for event in messages] == ids[3:]
    with server.socket("s", f"after={ids[0]}") as socket:
        assert json.loads(socket.recv(FAIL_SAFE_S))["event"] == "gap"


def test_a_recreated_stream_is_sent_as_a_gap_and_followed(client: Client, server: Server) -> None:
    publish(client, "s", range(2))
    with server.follow("s", query="after=earliest") as events:
        events.next(2)
        client.execute("DEL", "s")
        events.wait(comments=events.seen.comments + 1)
        publish(client, "s", [7])
        gap, message = events.next(2)
    assert (gap.kind, gap.data["reason"], numbers([message])) == ("gap", "recreated", [7])


def test_heartbeats_are_sent_while_no_message_arrives(client: Client, server: Server) -> None:
    with server.follow("nothing") as events:
        assert events.wait(comments=2).events == []


def test_a_key_that_is_no_stream_ends_its_own_connections_only(client: Client, server: Server) -> None:
    client.execute("SET", "text", "x")
    with server.follow("s") as other, server.follow("text") as events:
        [end] = events.rest()
        assert (end.kind, end.data["reason"]) == ("end", "failed")
        assert "not a stream" in end.data["text"]
        other.wait()
        publish(client, "s", [1])
        assert numbers(other.next()) == [1]


def test_an_invalid_request_is_refused_with_one_line_of_json(server: Server) -> None:
    for path in (
        "/streams",
        "/streams/a?stream=b",
        "/streams/a?after=x",
        "/streams/a?after=1-0,2-0",
        "/streams?stream=a&stream=b&after=1-0,2-0,3-0",
        f"/streams/a?after={2**64}-0",
        "/streams/a?token=0123456789",
        "/streams/a?aftr=0",
        "/streams?stream=a&Stream=b",
        "/streams?" + "&".join(f"stream={n}" for n in range(101)),
        "/streams?" + "&".join(["stream=a"] * 500),
    ):
        answer = server.http.get(path)
        assert answer.status_code == 400, path
        assert list(answer.json()) == ["error"]
        assert "\n" not in answer.json()["error"]
    error = server.http.get("/streams/a?aftr=0").json()["error"]
    assert error == "unknown parameter 'aftr'; use after, stream, ticket, lastEventId"
    assert server.http.get("/streams/a", headers={"Last-Event-ID": "nonsense"}).status_code == 400
    assert server.http.post("/streams/a").status_code == server.http.head("/streams/a").status_code == 405
    assert server.http.get("/elsewhere").status_code == 404
    assert server.http.get("/healthz").json() == {"status": "ok"}


def test_large_entries_arrive_whole_and_in_order_by_events_and_by_frames(client: Client, server: Server) -> None:
    values = [b"small", b"\xc3\xa4\n" * 700_000, b"\xff\x00" * 700_000, b"small again"]
    for value in values:
        client.execute("XADD", "s", "*", "v", value)
    shown = ["small", "\xe4\n" * 700_000, {"hex": "ff00" * 700_000}, "small again"]
    with server.follow("s", query="after=0") as events, server.socket("s", "after=0", max_size=None) as socket:
        assert [event.data["fields"]["v"] for event in events.next(4)] == shown
        frames = [list(socket.recv_streaming()) for _ in shown]
        found = [json.loads("".join(map(str, parts))) for parts in frames]
        assert [one["fields"]["v"] for one in found] == shown
        assert [one["position"] for one in found] == [one["id"] for one in found]
        assert max(len(part) for parts in frames for part in parts) < 500_000
