"""Clients that leave, stall or are slow, a server that stops, and Redis going away."""

import itertools
import json
import signal
from contextlib import ExitStack

import pytest
from websockets.exceptions import ConnectionClosed

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.gateways import Event, Events, Server, numbers, publish
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.router]

PAD = 20_000


def subscriptions(server: Server) -> float:
    return server.figure("millstream_router_subscriptions")


def is_held_up(server: Server) -> bool:
    """Whether something was sent, and no more since the last check."""
    before, now = (server.figure("millstream_serve_messages_sent_total", kind="sse") for _ in range(2))
    return 0 < before == now


def stalled(server: Server, stream: str) -> Events:
    """A client that has read the head of the answer and reads no more; its side of the socket holds little."""
    return Events(server.url, f"/streams/{stream}?after=0", {}, receive_bytes=4_096)


def test_a_client_that_leaves_has_no_subscription_any_more(client: Client, millstream_url: str) -> None:
    with Server(millstream_url) as server, ExitStack() as stack:
        events = [server.follow("s") for _ in range(5)]
        sockets = [stack.enter_context(server.socket("s", close_timeout=0.1)) for _ in range(5)]
        eventually(lambda: subscriptions(server) == 10, "all subscriptions")
        for one in events:
            one.close()
        sockets[0].close()
        for socket in sockets[1:]:
            socket.socket.shutdown(2)  # without a word
        # Nothing is published and no heartbeat is due: it is the end of the connection that is noticed.
        eventually(lambda: subscriptions(server) == 0, "the end of all subscriptions")
        eventually(lambda: server.connections == 0, "the end of all connections")
        server.wait_figure(10, "millstream_serve_connections_ended_total", reason="left")


def test_a_stalled_client_does_not_delay_others_and_is_cut_off(client: Client, millstream_url: str) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(Server(millstream_url, "--stall", "1", "--buffer", "20"))
        # What is on its way to it fits into its buffer: it never stalls, even while this process gets no time.
        other = stack.enter_context(Events(server.url, "/streams/s?after=0", {}, receive_bytes=1_000_000))
        lazy = stack.enter_context(stalled(server, "s"))
        stack.enter_context(server.socket("s", "after=0", max_queue=1))  # whose owner never reads
        for n in range(0, 200, 5):
            publish(client, "s", range(n, n + 5), PAD)
            assert numbers(other.next(5)) == list(range(n, n + 5))
        eventually(lambda: subscriptions(server) == 1, "the end of those that stalled")
        server.wait_figure(2, "millstream_serve_connections_ended_total", reason="stalled")
        publish(client, "s", [200])
        assert numbers(other.next()) == [200]
        assert not [event for event in lazy.rest() if event.kind == "end"], "it was cut"


def test_a_client_that_the_system_cut_off_is_counted_as_stalled(client: Client, millstream_url: str) -> None:
    # So little waits that the server may write on; it is the system which finds that nothing is read.
    with Server(millstream_url, "--stall", "1") as server, stalled(server, "s") as lazy:
        lazy.wait_head()
        publish(client, "s", range(3), PAD)
        eventually(lambda: subscriptions(server) == 0, "the end of the connection")
        server.wait_figure(1, "millstream_serve_connections_ended_total", reason="stalled")


def test_a_slow_client_falls_behind_and_loses_no_message(client: Client, millstream_url: str) -> None:
    with Server(millstream_url, "--buffer", "5") as server, stalled(server, "s") as slow:
        slow.wait_head()
        publish(client, "s", range(100), PAD)
        eventually(lambda: is_held_up(server), "it to take no more")
        publish(client, "s", range(100, 103))
        assert numbers(slow.next(103)) == list(range(103))


def test_stalled_clients_of_large_messages_buffer_no_more_than_the_budget_and_others_continue(
    client: Client, millstream_url: str
) -> None:
    size, budget = 100_000, 1_000_000
    publish(client, "large", range(100), size)
    with ExitStack() as stack:
        server = stack.enter_context(Server(millstream_url, "--budget-bytes", str(budget), "--stall", "3600"))
        clients = [stack.enter_context(stalled(server, "large")) for _ in range(10)]
        server.wait_figure(1, "millstream_router_at_budget")
        other = stack.enter_context(server.follow("s", query="after=0"))
        publish(client, "s", range(50))
        assert numbers(other.next(50)) == list(range(50))
        assert server.figure("millstream_router_buffered_bytes") <= budget + 10 * 3 * size
        assert numbers(clients[0].next(100)) == list(range(100)), "falling behind, it loses nothing"


def test_a_slow_client_that_is_disconnected_and_resumes_loses_no_message(client: Client, millstream_url: str) -> None:
    options = ("--buffer", "5", "--when-full", "disconnect")
    connections = itertools.count(1)
    with Server(millstream_url, *options) as server:

        def read_late() -> list[Event]:
            """What a slow client gets; [] if the server cut it, as this process did not read the end for seconds."""
            number = next(connections)
            with stalled(server, "s") as slow:
                slow.wait_head()
                if number == 1:
                    publish(client, "s", range(100), PAD)
                found = slow.rest()
            server.wait_figure(number, "millstream_serve_connections_ended_total", reason="slow")
            return found if found and found[-1].kind == "end" else []

        *messages, end = eventually(read_late, "a connection with an end")
        assert end.data["reason"] == "slow"
        while len(messages) < 100:
            with server.follow("s", last_event_id=messages[-1].id) as events:
                messages += [event for event in events.next(min(5, 100 - len(messages))) if event.kind == "message"]
        assert numbers(messages) == list(range(100))


def test_a_client_that_may_lose_messages_receives_their_number(client: Client, millstream_url: str) -> None:
    options = ("--buffer", "5", "--when-full", "drop-oldest")
    with Server(millstream_url, *options) as server, stalled(server, "s") as slow:
        slow.wait_head()
        publish(client, "s", range(100), PAD)
        eventually(lambda: server.figure("millstream_router_messages_dropped_total") > 0, "the loss of some")
        publish(client, "s", [100])
        found: list[Event] = []
        while not found or found[-1].kind != "message" or numbers(found[-1:]) != [100]:
            found += slow.next()
        dropped = sum(event.data["count"] for event in found if event.kind == "dropped")
        messages = [event for event in found if event.kind == "message"]
        assert len(messages) + dropped == 101
        assert numbers(messages) == sorted(numbers(messages))
        assert server.figure("millstream_serve_messages_dropped_total", kind="sse") == dropped


def test_a_stop_disconnects_every_client_with_a_hint_when_to_reconnect(client: Client, millstream_url: str) -> None:
    # But for the stop, a client that takes nothing would be waited for for an hour.
    with Server(millstream_url, "--stop-timeout", "60", "--stall", "3600") as server:
        publish(client, "s", range(500), PAD)
        with server.follow("e") as events, server.socket("e") as socket, stalled(server, "s") as lazy:
            events.wait()
            assert json.loads(socket.recv(FAIL_SAFE_S))["event"] == "start"
            server.process.send_signal(signal.SIGTERM)
            [end] = events.rest()
            assert (end.kind, end.data["reason"]) == ("end", "stopping")
            assert events.ended, "the answer came to its proper end"
            assert events.seen.retry_ms
            with pytest.raises(ConnectionClosed) as caught:
                socket.recv(FAIL_SAFE_S)
            assert caught.value.rcvd is not None
            assert (caught.value.rcvd.code, "reconnect" in caught.value.rcvd.reason) == (1012, True)
            assert server.process.wait(FAIL_SAFE_S) == 0, "who takes nothing holds nobody up"
            assert lazy.status == 200
        assert server.process.stdout is not None
        assert json.loads(server.process.stdout.readline()) == {"event": "stopped"}


def test_clients_stay_connected_and_get_heartbeats_while_redis_is_away(millstream_fresh_server: EmbeddedServer) -> None:
    redis = millstream_fresh_server
    with Server(redis.url, "--heartbeat", "0.2") as server, server.follow("s") as events:
        with server.socket("s") as socket, Client(redis.url) as client:
            events.wait()
            assert json.loads(socket.recv(FAIL_SAFE_S))["event"] == "start"
            publish(client, "s", range(3))
            assert numbers(events.next(3)) == [0, 1, 2]
            redis.kill()
            events.wait(comments=events.seen.comments + 4)
            assert server.http.get("/healthz").status_code == 200  # a restart would help no client yet
            redis.restart()
            client.close()
            publish(client, "s", range(3, 6))
            assert numbers(events.next(3)) == [3, 4, 5]
            assert [json.loads(socket.recv(FAIL_SAFE_S))["fields"]["n"] for _ in range(6)] == [str(n) for n in range(6)]
            assert events.seen.events == []
        # What a browser would do meanwhile:
        redis.kill()
        with server.follow("s", query="after=0") as fresh:
            fresh.wait(comments=2)
            redis.restart()
            assert numbers(fresh.next(6)) == list(range(6))


def test_the_gateway_counts_messages_and_connections(client: Client, millstream_url: str) -> None:
    with Server(millstream_url) as server:
        publish(client, "s", range(7))
        with server.follow("s", query="after=0") as events, server.socket("s", "after=0") as socket:
            events.next(7)
            socket.recv(FAIL_SAFE_S)
            server.wait_figure(7, "millstream_serve_messages_sent_total", kind="sse")
            server.wait_figure(7, "millstream_serve_messages_sent_total", kind="websocket")
            server.wait_figure(1, "millstream_serve_connections", kind="websocket")
        assert server.http.get("/streams/s?after=x").status_code == 400
        assert server.figure("millstream_serve_connections_refused_total", status="400") == 1
