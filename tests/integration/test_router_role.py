"""RouterRole: one worker at a time enqueues the entries of a stream."""

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.key_names import router_session_key
from millstream.worker.fetching import router_role
from millstream.worker.fetching.router_role import RouterRole
from tests.support.clocks import ManualClock
from tests.support.command_stats import commands_run
from tests.support.waiting import eventually
from tests.support.workers import make, make_context

pytestmark = [pytest.mark.worker, pytest.mark.keys]

ROLE_MS = 180_000
"""How long a session lasts here, in milliseconds: none expires in Redis in the course of a test."""


class Roles:
    """The roles of two workers, whose clock stands still. A session expires only when the test says so."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.clock = ManualClock()
        context = make_context(client, make(lambda message: None, key="k"), clock=self.clock)
        self.first, self.second = RouterRole(context, client), RouterRole(context, client)

    def acquire(self, role: RouterRole, *streams: str) -> set[str]:
        """Acquire or renew a role on these streams; return where it is held."""
        role.acquire(streams)
        return role.held

    def sessions(self) -> list[bytes]:
        """The keys of all sessions."""
        return list(self.client.execute("KEYS", router_session_key("app", "handle", "*")))

    def end_sessions(self) -> None:
        """Expire the sessions of both workers."""
        for key in self.sessions():
            self.client.execute("DEL", key)


@pytest.fixture
def roles(client: Client, monkeypatch: pytest.MonkeyPatch) -> Roles:
    monkeypatch.setattr(router_role, "ROLE_MS", ROLE_MS)
    return Roles(client)


def test_a_stream_has_one_router_until_that_worker_releases_the_role(roles: Roles) -> None:
    assert roles.acquire(roles.first, "a", "b") == {"a", "b"}
    assert roles.acquire(roles.second, "b", "c") == {"c"}
    roles.first.release()
    roles.second.make_due()
    assert roles.acquire(roles.second, "a", "b", "c") == {"a", "b", "c"}


def test_a_worker_that_has_ended_without_a_release_has_no_role_once_its_session_has_ended(roles: Roles) -> None:
    roles.acquire(roles.first, "a", "b")
    assert roles.acquire(roles.second, "a", "b") == set()
    roles.end_sessions()
    assert roles.acquire(roles.second, "a", "b") == set(), "the second looks for ended sessions once a second"
    roles.clock.now_ms += ROLE_MS / 3
    assert roles.acquire(roles.second, "a", "b") == {"a", "b"}


def test_a_worker_whose_session_ended_while_it_was_frozen_keeps_only_the_roles_that_no_other_has(roles: Roles) -> None:
    roles.acquire(roles.first, "a", "b")
    roles.acquire(roles.second, "a")
    roles.end_sessions()
    roles.clock.now_ms += ROLE_MS / 3
    assert roles.acquire(roles.second, "a") == {"a"}
    assert roles.acquire(roles.first, "a", "b") == {"b"}


def test_a_session_that_a_clock_set_back_has_made_longer_is_cut_to_its_length(roles: Roles) -> None:
    roles.acquire(roles.first, "a")
    roles.acquire(roles.second, "a")
    sessions = roles.sessions()
    assert len(sessions) == 2
    for key in sessions:
        roles.client.execute("PEXPIRE", key, 100 * ROLE_MS)
    roles.clock.now_ms += ROLE_MS / 3
    roles.second.acquire(["a"])
    assert all(0 < roles.client.execute("PTTL", key) <= ROLE_MS for key in sessions)


def test_to_renew_the_roles_on_many_streams_costs_as_much_as_on_one(roles: Roles) -> None:
    streams = [f"s{number}" for number in range(100)]
    roles.acquire(roles.first, *streams)
    roles.acquire(roles.second, *streams)

    def costs_as_one() -> bool:
        roles.clock.now_ms += ROLE_MS / 3
        before = commands_run(roles.client.execute)
        roles.first.acquire(streams)
        roles.second.acquire(streams)
        return commands_run(roles.client.execute) - before == {"set": 2, "pttl": 1, "info": 1}

    # A thread of another test may still use a client of its own.
    eventually(costs_as_one, "a renewal that costs as much as on one stream")


def test_a_change_of_the_held_streams_leaves_a_set_that_another_thread_reads_as_it_is(roles: Roles) -> None:
    seen = roles.acquire(roles.first, "a")
    assert roles.acquire(roles.first, "a", "b") == {"a", "b"}
    assert seen == {"a"}
