"""RouterRole: one worker at a time enqueues the entries of a stream."""

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.worker.fetching.router_role import ROLE_MS, RouterRole
from tests.support.clocks import ManualClock
from tests.support.workers import make, make_context

pytestmark = [pytest.mark.worker, pytest.mark.keys]


class Roles:
    """The roles of two workers, whose clock stands still. In Redis a role expires only when the test says so."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.clock = ManualClock()
        context = make_context(client, make(lambda message: None, key="k"), clock=self.clock)
        self.first, self.second = RouterRole(context, client), RouterRole(context, client)

    def acquire(self, role: RouterRole, *streams: str) -> set[str]:
        """Acquire or renew a role on these streams; return where it is held."""
        role.acquire(streams)
        self._client.pipeline([("PERSIST", HandlerKeys("app", "handle", name).router) for name in streams])
        return role.held

    def expire(self, stream: str) -> None:
        self._client.execute("DEL", HandlerKeys("app", "handle", stream).router)


@pytest.fixture
def roles(client: Client) -> Roles:
    return Roles(client)


def test_a_stream_has_one_router_until_that_worker_releases_the_role(roles: Roles) -> None:
    assert roles.acquire(roles.first, "a", "b") == {"a", "b"}
    assert roles.acquire(roles.second, "b", "c") == {"c"}
    roles.first.release()
    roles.second.make_due()
    assert roles.acquire(roles.second, "a", "b", "c") == {"a", "b", "c"}


def test_the_role_is_acquired_on_a_new_stream_before_it_is_renewed_on_the_others(roles: Roles) -> None:
    roles.acquire(roles.first, "a")
    roles.expire("a")
    roles.acquire(roles.second, "a")
    assert roles.acquire(roles.first, "a", "b") == {"a", "b"}, "it has not asked for the first stream again"
    roles.clock.now_ms += ROLE_MS / 3
    assert roles.acquire(roles.first, "a", "b") == {"b"}
    assert roles.second.held == {"a"}


def test_a_change_of_the_held_streams_leaves_a_set_that_another_thread_reads_as_it_is(roles: Roles) -> None:
    seen = roles.acquire(roles.first, "a")
    assert roles.acquire(roles.first, "a", "b") == {"a", "b"}
    assert seen == {"a"}
