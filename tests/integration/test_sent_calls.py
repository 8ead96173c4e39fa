"""Calls that the client sends without waiting for their replies."""

import threading
from collections.abc import Callable

import pytest

from millstream.errors import GroupMissing, Unavailable, WrongType
from millstream.redis_client.call import Call
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.scripts import Script
from millstream.testing.proxy import Proxy
from tests.support.deployments import lent_cluster
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.worker]

PUSH = Call(("RPUSH", "list", "a"), int)


def test_a_sent_call_has_its_own_reply_whatever_is_called_before_it_is_read(client: Client) -> None:
    sent = client.send(PUSH)
    assert client.execute("ECHO", "between") == b"between"
    assert client.pipeline([("ECHO", "1"), ("LLEN", "list")]) == [b"1", 1]
    assert (sent.result(), sent.result()) == (1, 1)


def test_a_sent_call_is_executed_though_its_reply_is_never_asked_for(client: Client) -> None:
    client.send(PUSH)
    second = client.send(PUSH)
    assert second.result() == 2
    assert client.execute("LLEN", "list") == 2


def test_threads_that_share_a_client_leave_each_other_the_replies_to_their_sent_calls(client: Client) -> None:
    wrong: list[object] = []

    def ask(number: int) -> None:
        for turn in range(200):
            text = f"{number}-{turn}".encode()
            sent = client.send(Call(("ECHO", text), bytes))
            if turn % 2:
                wrong.extend(reply for reply in [client.execute("ECHO", number)] if reply != b"%d" % number)
            wrong.extend(reply for reply in [sent.result()] if reply != text)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAIL_SAFE_S)
    assert wrong == []


def test_an_error_reply_to_a_sent_call_is_its_result(client: Client) -> None:
    client.execute("SET", "list", "text")
    sent = client.send(PUSH)
    assert client.execute("GET", "list") == b"text", "the next call is not concerned"
    assert isinstance(sent.result(), WrongType)
    missing = client.send(Call(("XREADGROUP", "GROUP", "g", "c", "STREAMS", "none", ">"), list))
    assert isinstance(missing.result(), GroupMissing)


def test_a_sent_script_that_the_server_lacks_is_sent_again_with_its_text(client: Client) -> None:
    client.execute("SCRIPT", "FLUSH")
    sent = client.send(Call(Script("shared/hold_name").command(("n",), ("me", 60_000)), int))
    assert client.execute("PING") == b"PONG"
    assert sent.result() == 1
    assert client.execute("EXISTS", "n") == 1


@pytest.mark.parametrize("cut", [Proxy.cut_before, Proxy.cut_after])
def test_a_sent_call_whose_connection_breaks_is_unavailable_and_the_next_call_opens_another(
    millstream_server: EmbeddedServer, client: Client, cut: Callable[..., None]
) -> None:
    with Proxy(millstream_server.port) as proxy, Client(proxy.url) as unlucky:
        unlucky.execute("PING")
        for reads_first in (True, False):
            cut(proxy, "RPUSH")
            sent = unlucky.send(PUSH)
            if reads_first:
                assert isinstance(sent.result(), Unavailable)
            assert unlucky.execute("ECHO", "next") == b"next"
            assert isinstance(sent.result(), Unavailable)
            assert "cannot be reached" in str(sent.result())
    assert client.execute("LLEN", "list") == (2 if cut is Proxy.cut_after else 0)


def test_the_reply_to_a_sent_call_is_lost_with_its_connection(client: Client) -> None:
    sent = client.send(PUSH)
    client.close()
    assert client.execute("PING") == b"PONG", "and not the reply to the call before"
    assert isinstance(sent.result(), Unavailable)
    assert "was closed" in str(sent.result())


def test_sending_to_a_server_that_cannot_be_reached_raises_nothing_and_says_so_in_the_result() -> None:
    with Client("redis://127.0.0.1:1") as nowhere:
        assert isinstance(nowhere.send(PUSH).result(), Unavailable)


def test_a_call_that_is_sent_to_a_cluster_has_been_executed_by_its_node(request: pytest.FixtureRequest) -> None:
    with Client(lent_cluster(request).url) as client:
        keys = [f"sent:{n}" for n in range(20)]
        sent = [client.send(Call(("INCR", key), int)) for key in keys]
        assert [client.execute("GET", key) for key in keys] == [b"1"] * len(keys)
        assert [one.result() for one in sent] == [1] * len(keys)
        client.pipeline([("DEL", key) for key in keys])
