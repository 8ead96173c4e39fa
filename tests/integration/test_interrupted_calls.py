"""Calls of a client that an exception from outside ends: Ctrl-C in a notebook, a time limit that a signal ends."""

import sys
from collections.abc import Callable

import pytest

from millstream.errors import Unavailable
from millstream.redis_client.call import Call, SentCall
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.resp import Reply, ReplySize
from millstream.redis_client.tracked_client import TrackedClient
from tests.support.deployments import lent_cluster
from tests.support.interruptions import Interruption, IsStep, call_of, interrupt, opcodes_of, opcodes_of_functions
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.worker,
    # Where redis-py is interrupted between two instructions, it may drop a socket without closing it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

OF_CLIENT = opcodes_of("redis_client/client.py", "redis_client/call.py", "redis_client/deployments.py")
OF_CONNECTION = opcodes_of("redis_client/deployments.py", "redis/connection.py", "_parsers/hiredis.py")
ECHO = Call(("ECHO", "sent"), bytes)


def _send_and_close(client: Client) -> None:
    client.send(ECHO)
    client.close()


def _send_twice(client: Client) -> None:
    first, second = client.send(ECHO), client.send(ECHO)
    second.result()
    first.result()


CALLS: dict[str, Callable[[Client], object]] = {
    "one": lambda client: client.execute("ECHO", "first"),
    "many": lambda client: client.pipeline([("ECHO", "first"), ("GET", "none"), ("ECHO", "third")]),
    "measured": lambda client: client.pipeline([("ECHO", "first"), ("ECHO", "second")], ReplySize(1_000)),
    "skipping": lambda client: client.pipeline_skipping([(("ECHO", "silent"), ("ECHO", "first"))] * 2),
    "sent": _send_twice,
    "sent before another": lambda client: (client.send(ECHO), client.execute("ECHO", "first")),
    "sent before the end": _send_and_close,
}


def _interrupted_at_each_step(client: Client, call: Callable[[Client], object], is_step: IsStep) -> int:
    """Interrupt `call` at each of its steps, and then check the replies of this client; return how many steps it has."""
    steps = 0
    while interrupt(lambda: call(client), steps, is_step):
        for text in (b"%d" % steps, b"again %d" % steps):
            assert client.execute("ECHO", text) == text, f"interrupted at step {steps}"
        steps += 1
    return steps


@pytest.mark.parametrize("call", CALLS)
def test_whatever_step_of_a_call_an_exception_interrupts_the_next_one_gets_its_own_reply(
    millstream_server: EmbeddedServer, call: str
) -> None:
    with Client(millstream_server.url) as client:
        client.execute("PING")
        assert _interrupted_at_each_step(client, CALLS[call], OF_CLIENT) > 50


def test_a_second_exception_while_the_connections_are_closed_leaves_no_reply_to_the_next_call(
    millstream_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(connection: object) -> None:
        raise Interruption

    def first(client: Client) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Client, "_read", staticmethod(interrupted))
            client.execute("ECHO", "first")

    with Client(millstream_server.url) as client:
        client.execute("PING")
        assert _interrupted_at_each_step(client, first, opcodes_of_functions("close", "disconnect")) > 50


def test_replies_to_commands_that_redis_would_not_skip_are_never_those_of_the_next_call(
    client: Client, clerk: Client
) -> None:
    client.execute("ACL", "SETUSER", "clerk", "-client|reply")
    clerk.execute("PING")
    pairs = [(("ECHO", "silent"), ("ECHO", "first"))]
    assert _interrupted_at_each_step(clerk, lambda clerk: clerk.pipeline_skipping(pairs), OF_CLIENT) > 50


def test_an_interrupted_call_to_a_node_of_a_cluster_leaves_no_reply_to_the_next_one(
    request: pytest.FixtureRequest,
) -> None:
    with Client(lent_cluster(request).url) as client:
        client.execute("SET", "a", "of a")
        client.execute("SET", "b", "of b")
        steps = 0
        while interrupt(lambda: client.pipeline([("GET", "b"), ("GET", "a")]), steps, OF_CLIENT):
            assert client.pipeline([("GET", "a"), ("GET", "b")]) == [b"of a", b"of b"], f"interrupted at step {steps}"
            steps += 1
        assert steps > 50


def test_a_connection_whose_setup_was_interrupted_is_not_used(millstream_server: EmbeddedServer) -> None:
    with Client(f"{millstream_server.url.rpartition('/')[0]}/3") as client:

        def connect() -> None:
            client.close()
            client.execute("PING")

        steps = 0
        while interrupt(connect, steps, OF_CONNECTION):
            assert b" db=3 " in client.execute("CLIENT", "INFO"), f"interrupted at step {steps}"
            steps += 1
        assert steps > 50


def test_a_reply_that_was_kept_before_an_interruption_is_not_returned_after_its_key_has_changed(
    millstream_server: EmbeddedServer,
) -> None:
    of_tracking = opcodes_of("redis_client/tracked_client.py", "redis_client/key_tracking.py")
    with TrackedClient(millstream_server.url) as tracked, Client(millstream_server.url) as other:

        def read() -> list[Reply]:
            tracked.begin_collection()
            return tracked.pipeline([("LLEN", "list")])

        other.execute("DEL", "list")
        steps = 0
        other.execute("RPUSH", "list", "a")
        while interrupt(read, steps, of_tracking):
            steps += 1
            assert read() == [steps], f"interrupted at step {steps - 1}"
            other.execute("RPUSH", "list", "a")
        assert steps > 50
        assert read() == [steps + 1]
        other.execute("DEL", "list")


def test_redis_blocks_no_longer_for_a_read_that_was_interrupted(millstream_server: EmbeddedServer) -> None:
    with Client(millstream_server.url) as client, Client(millstream_server.url) as other:
        client.execute("PING")
        assert interrupt(lambda: client.execute("BLPOP", "list", 0), 0, call_of("read_response"))
        eventually(lambda: b"blocked_clients:0" in other.execute("INFO", "clients"), "the end of the blocked read")
        other.execute("RPUSH", "list", "a")
        assert other.execute("LLEN", "list") == 1
        other.execute("DEL", "list")


def test_a_sent_call_whose_reply_was_not_read_is_unavailable_and_never_a_good_result(
    millstream_server: EmbeddedServer,
) -> None:
    call = Call(("ECHO", "good"), lambda reply: reply or [])
    with Client(millstream_server.url) as client:
        steps = results = 0
        while True:
            sent = client.send(call)
            if not interrupt(sent.result, steps, OF_CLIENT):
                break
            result = sent.result()
            assert result == b"good" or isinstance(result, Unavailable), f"interrupted at step {steps}"
            assert "cannot be reached" not in str(result), "no second reply is waited for"
            results += result == b"good"
            steps += 1
        assert 0 < results < steps
    assert isinstance(SentCall(call, lambda sent: None).result(), Unavailable)


def test_an_interruption_leaves_no_exception_that_later_ones_would_have_as_their_context() -> None:
    def action() -> None:
        try:
            raise ValueError
        except ValueError:
            pass

    steps = 0
    while interrupt(action, steps, opcodes_of_functions("action")):
        assert sys.exc_info()[1] is None, f"interrupted at step {steps}"
        steps += 1
    assert steps > 5
