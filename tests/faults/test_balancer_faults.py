"""Owners of streams are killed, stopped, cut off and outnumbered: each stream has an owner again in time, and never two."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from millstream.balancer import announce
from millstream.balancer.survey import survey
from millstream.client import Client
from millstream.naming import ServiceKeys
from millstream.server import EmbeddedServer
from millstream.testing.proxy import Proxy
from tests.faults.driver import HERE
from tests.faults.fleet import Tell, eventually
from tests.faults.lease_owner import REFUSED, SERVICE, WRITES

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
pytestmark = [pytest.mark.faults, pytest.mark.timeout(600 if SOAK else 120)]

STREAMS = 2_000 if SOAK else 300
LEASE_MS = 1_000
KEYS = ServiceKeys(SERVICE)


@pytest.fixture
def client(millstream_fresh_server: EmbeddedServer) -> Iterator[Client]:
    with Client(millstream_fresh_server.url) as opened:
        assert opened.execute("CONFIG", "GET", "notify-keyspace-events")[1] == b""  # nothing here depends on events
        for number in range(STREAMS):
            announce(opened, SERVICE, f"call:{number}")
        yield opened


@dataclass
class Owner:
    name: str
    process: "subprocess.Popen[bytes]"

    def kill(self) -> float:
        """kill -9; return when, in seconds since 1970."""
        self.process.kill()
        at = time.time()
        self.process.wait()
        return at


@contextmanager
def owning(client: Client, folder: Path, name: str, url: str | None = None, *, moves: float = 1.0) -> Iterator[Owner]:
    """A process that takes part as `name`, by way of `url`; `moves` as of BalancerPolicy."""
    command = [sys.executable, f"{HERE}/lease_owner.py", url or client.url, client.url, name, str(LEASE_MS), str(moves)]
    with (folder / f"{name}.log").open("ab") as log:
        owner = Owner(name, subprocess.Popen(command, stderr=log))
    try:
        yield owner
    finally:
        owner.process.send_signal(signal.SIGCONT)
        owner.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            owner.process.wait(10)
        owner.process.kill()
        owner.process.wait()


def counts(client: Client) -> Counter[str]:
    return Counter({one.name: one.streams for one in survey(client, SERVICE).consumers})


def eventually_shared(client: Client, *names: str) -> None:
    """Until these, and no others, have all streams, each within 10 % of its part."""

    def is_shared() -> bool:
        found = counts(client)
        part = STREAMS / len(names)
        return (
            set(found) == set(names)
            and sum(found.values()) == STREAMS
            and all(abs(found[name] - part) <= max(1, 0.1 * part) for name in names)
        )

    eventually(is_shared, f"fair shares of {names}", within_s=60, log=lambda: str(counts(client)))


def writes(client: Client, key: str = WRITES) -> list[tuple[float, str, int, str]]:
    """When, on which stream, under which token, by whom: the first write under each token."""
    found = []
    for entry_id, pairs in client.execute("XRANGE", key, "-", "+"):
        row = {pairs[i].decode(): pairs[i + 1].decode() for i in range(0, len(pairs), 2)}
        found.append((int(entry_id.partition(b"-")[0]) / 1000, row["stream"], int(row["token"]), row["by"]))
    return found


def check_owners(client: Client) -> None:
    """Each stream was written to by one owner after another, each under a token of its own, greater than those before."""
    tokens: dict[str, list[int]] = defaultdict(list)
    owner_of: dict[tuple[str, int], str] = {}
    for _, stream, token, by in writes(client):
        tokens[stream].append(token)
        assert owner_of.setdefault((stream, token), by) == by
    assert all(some == sorted(set(some)) for some in tokens.values())
    assert set(tokens) == {f"call:{number}" for number in range(STREAMS)}
    assert set(client.execute("HKEYS", KEYS.streams)) == {name.encode() for name in tokens}


def regained_s(client: Client, owner: str, at: float) -> list[float]:
    """After how many seconds each stream that `owner` had written to at last before `at` was another's."""
    last: dict[str, str] = {}
    again: dict[str, float] = {}
    for when, stream, _, by in writes(client):
        if by != owner and last.get(stream) == owner and when > at:
            again.setdefault(stream, when - at)
        if when <= at:
            last[stream] = by
    lost = {stream for stream, by in last.items() if by == owner}
    assert lost <= again.keys()
    return [again[stream] for stream in lost]


@pytest.mark.alone
def test_streams_of_an_owner_that_is_killed_are_owned_again_within_their_lease_and_a_second(
    client: Client, tmp_path: Path, tell: Tell
) -> None:
    with ExitStack() as stack:
        owners = [stack.enter_context(owning(client, tmp_path, f"c{number}")) for number in range(3)]
        eventually_shared(client, "c0", "c1", "c2")
        killed_at = owners[0].kill()
        eventually_shared(client, "c1", "c2")
        time.sleep(0.2)
        took_s = regained_s(client, "c0", killed_at)
    tell(None, streams=len(took_s), owned_again_within_s=round(max(took_s), 2), lease_s=LEASE_MS / 1000)
    assert max(took_s) < LEASE_MS / 1000 + 1.0
    check_owners(client)


def test_an_owner_that_was_stopped_past_its_lease_is_refused_what_it_writes_late_and_takes_part_again(
    client: Client, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        owners = [stack.enter_context(owning(client, tmp_path, f"c{number}")) for number in range(2)]
        eventually_shared(client, "c0", "c1")
        owners[0].process.send_signal(signal.SIGSTOP)
        eventually_shared(client, "c1")
        owners[0].process.send_signal(signal.SIGCONT)
        eventually_shared(client, "c0", "c1")
    check_owners(client)
    assert {by for _, _, _, by in writes(client, REFUSED)} <= {"c0"}


def test_an_owner_that_is_cut_off_loses_its_streams_to_others_and_comes_back(
    millstream_fresh_server: EmbeddedServer, client: Client, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(millstream_fresh_server.port))
        stack.enter_context(owning(client, tmp_path, "c0", proxy.url))
        stack.enter_context(owning(client, tmp_path, "c1"))
        eventually_shared(client, "c0", "c1")
        proxy.freeze()
        eventually_shared(client, "c1")
        late = len(writes(client, REFUSED))
        time.sleep(2 * LEASE_MS / 1000)  # by now it knows by its own clock that it has nothing any more
        quiet = len(writes(client, REFUSED))
        time.sleep(LEASE_MS / 1000)
        assert len(writes(client, REFUSED)) == quiet >= late
        proxy.resume()
        eventually_shared(client, "c0", "c1")
    check_owners(client)


def test_a_redis_that_was_away_longer_than_the_leases_finds_every_stream_with_an_owner(
    millstream_fresh_server: EmbeddedServer, client: Client, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(millstream_fresh_server.port))
        for name in ("c0", "c1"):
            stack.enter_context(owning(client, tmp_path, name, proxy.url))
        eventually_shared(client, "c0", "c1")
        proxy.freeze()  # for both: their leases end while nobody can say so
        time.sleep(3 * LEASE_MS / 1000)
        proxy.resume()
        eventually_shared(client, "c0", "c1")
        millstream_fresh_server.kill()
        time.sleep(2 * LEASE_MS / 1000)
        millstream_fresh_server.start()
        client.patiently(lambda: client.execute("PING"), what="test")
        eventually_shared(client, "c0", "c1")
    check_owners(client)


def moved(client: Client) -> int:
    """How often a stream has changed hands for balance, or because an owner left."""
    return sum(b"released" in pairs for _, pairs in client.execute("XRANGE", KEYS.events, "-", "+"))


def test_from_one_to_five_to_two_owners_shares_stay_fair_and_no_more_streams_move_than_must(
    client: Client, tmp_path: Path, tell: Tell
) -> None:
    with ExitStack() as stack:
        stack.enter_context(owning(client, tmp_path, "c0", moves=0.05))
        eventually_shared(client, "c0")
        began = time.monotonic()
        leaving = [stack.enter_context(owning(client, tmp_path, f"c{n}", moves=0.05)) for n in range(1, 5)]
        eventually_shared(client, "c0", "c1", "c2", "c3", "c4")
        grown_s = time.monotonic() - began
        grown = moved(client)
        for owner in leaving[1:]:
            owner.process.terminate()
        eventually_shared(client, "c0", "c1")
        shrunk = moved(client) - grown
    tell(None, moved_growing=grown, moved_shrinking=shrunk, shared_within_s=round(grown_s, 1))
    assert grown <= 1.1 * STREAMS * 4 / 5
    assert shrunk <= 1.1 * STREAMS * 3 / 5 + 3
    check_owners(client)
