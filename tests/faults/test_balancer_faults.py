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

import psutil
import pytest

from millstream.balancer import announce
from millstream.balancer.service_status import fetch_service_state
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import ServiceKeys
from millstream.redis_client.pipelining import server_time_ms
from millstream.testing.proxy import Proxy
from tests.support.apps.lease_owner import REFUSED, SERVICE, WRITES
from tests.support.fields import text_fields
from tests.support.quick_programs import Program
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.worker_processes import PrintFigures

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
pytestmark = [pytest.mark.balancer, pytest.mark.faults]

STREAMS = 2_000 if SOAK else 120
ROOT = Path(__file__).parents[2]
LEASE_MS = 1_500
MEDIUM_MS = 4_000
"""Where the lease of one owner is to end, and no other although the machine is slow."""
LONG_MS = 8_000
"""Where no lease is to end although the machine is slow."""
KEYS = ServiceKeys(SERVICE)


@pytest.fixture
def client(fresh_client: Client) -> Client:
    assert fresh_client.execute("CONFIG", "GET", "notify-keyspace-events")[1] == b""  # nothing here depends on events
    for number in range(STREAMS):
        announce(fresh_client, SERVICE, f"call:{number}")
    return fresh_client


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
def owning(
    client: Client, folder: Path, name: str, url: str | None = None, *, moves: float = 1.0, lease_ms: int = LEASE_MS
) -> Iterator[Owner]:
    """A process that takes part as `name`, by way of `url`; `moves` and `lease_ms` as of BalancerPolicy."""
    command = [
        sys.executable,
        "-m",
        "tests.support.apps.lease_owner",
        url or client.url,
        client.url,
        name,
        str(lease_ms),
        str(moves),
    ]
    with (folder / f"{name}.log").open("ab") as log:
        owner = Owner(name, Program(command, stderr=log, cwd=ROOT))
    try:
        yield owner
    finally:
        owner.process.send_signal(signal.SIGCONT)
        owner.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            owner.process.wait(FAIL_SAFE_S)
        owner.process.kill()
        owner.process.wait()


def counts(client: Client) -> Counter[str]:
    return Counter({one.name: one.streams for one in fetch_service_state(client, SERVICE).consumers})


def eventually_shared(client: Client, *names: str, within: float = 0.1) -> None:
    """Until these, and no others, have all streams, each within 10 % of its part, or as given; 0: no more will move."""

    def is_shared() -> bool:
        found = counts(client)
        part = STREAMS / len(names)
        return (
            set(found) == set(names)
            and sum(found.values()) == STREAMS
            and all(abs(found[name] - part) < max(1, within * part) for name in names)
        )

    eventually(is_shared, f"fair shares of {names}", log=lambda: str(counts(client)))


def stopped(process: "subprocess.Popen[bytes]") -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def writes(client: Client, key: str = WRITES) -> list[tuple[float, str, int, str]]:
    """When, on which stream, under which token, by which consumer: the first write under each token."""
    found = []
    for entry_id, pairs in client.execute("XRANGE", key, "-", "+"):
        row = text_fields(pairs)
        found.append((int(entry_id.partition(b"-")[0]) / 1000, row["stream"], int(row["token"]), row["by"]))
    return found


def writers(client: Client) -> Counter[str]:
    """How many streams each owner was the last to write to."""
    return Counter({stream: by for _, stream, _, by in writes(client)}.values())


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


def eventually_regained_s(client: Client, owner: str, at: float) -> list[float]:
    """After how many seconds each stream that `owner` had written to at last before `at` was written to by another."""
    found: list[dict[str, float | None]] = []

    def all_are() -> bool:
        found[:] = [regained_s(client, owner, at)]
        return None not in found[0].values()

    eventually(all_are, f"other owners of what was {owner}'s", log=lambda: str(found))
    return [took_s for took_s in found[0].values() if took_s is not None]


def regained_s(client: Client, owner: str, at: float) -> dict[str, float | None]:
    last: dict[str, str] = {}
    again: dict[str, float] = {}
    for when, stream, _, by in writes(client):
        if by != owner and last.get(stream) == owner and when > at:
            again.setdefault(stream, when - at)
        if when <= at:
            last[stream] = by
    return {stream: again.get(stream) for stream, by in last.items() if by == owner}


def test_streams_of_a_killed_owner_have_an_owner_again_once_their_lease_has_ended(
    client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    """How soon after that: `benchmarks lease_takeover`."""
    with ExitStack() as stack:
        owners = [stack.enter_context(owning(client, tmp_path, f"c{n}", lease_ms=MEDIUM_MS)) for n in range(3)]
        eventually_shared(client, "c0", "c1", "c2", within=0)
        eventually(lambda: writers(client) == counts(client), "all at work on all that they have")
        until_s = float(client.execute("ZSCORE", KEYS.alive, "c0")) / 1000
        killed_at = owners[0].kill()
        eventually_shared(client, "c1", "c2")
        took_s = eventually_regained_s(client, "c0", killed_at)
    print_figures(None, streams=len(took_s), owned_again_within_s=round(max(took_s), 2), lease_s=MEDIUM_MS / 1000)
    assert killed_at + min(took_s) >= until_s - 0.001, "none before the lease has ended, by the server's clock"
    check_owners(client)


def test_late_writes_of_an_owner_that_was_stopped_past_its_lease_are_refused_and_it_rejoins(
    client: Client, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        owners = [stack.enter_context(owning(client, tmp_path, f"c{n}", lease_ms=MEDIUM_MS)) for n in range(2)]
        eventually_shared(client, "c0", "c1", within=0)
        eventually(lambda: writers(client) == counts(client), "both at work on all that they have")
        stopped_at = time.time()
        owners[0].process.send_signal(signal.SIGUSR1)
        eventually_shared(client, "c1")
        eventually(lambda: stopped(owners[0].process), "it to stand still")
        lost = set(regained_s(client, "c0", stopped_at))
        assert len(lost) == STREAMS // 2
        eventually(lambda: writers(client) == {"c1": STREAMS}, "c1 at work on all of them")
        owners[0].process.send_signal(signal.SIGCONT)
        eventually_shared(client, "c0", "c1")

        def refused() -> set[str]:
            return {stream for _, stream, _, by in writes(client, REFUSED) if by == "c0"}

        eventually(lambda: refused() >= lost, "each write that it was about to make to be refused")
    check_owners(client)


def test_an_owner_that_is_cut_off_loses_its_streams_to_others_and_rejoins(
    millstream_fresh_server: EmbeddedServer, client: Client, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(millstream_fresh_server.port))
        stack.enter_context(owning(client, tmp_path, "c0", proxy.url))
        stack.enter_context(owning(client, tmp_path, "c1"))
        eventually_shared(client, "c0", "c1")
        proxy.freeze()
        eventually_shared(client, "c1")
        eventually(lambda: is_quiet(client, REFUSED), "it to know by its own clock that it has nothing any more")
        proxy.resume()
        eventually_shared(client, "c0", "c1")
    check_owners(client)


def test_every_stream_has_an_owner_after_redis_was_away_for_longer_than_the_leases(
    millstream_fresh_server: EmbeddedServer, client: Client, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(millstream_fresh_server.port))
        for name in ("c0", "c1"):
            stack.enter_context(owning(client, tmp_path, name, proxy.url))
        eventually_shared(client, "c0", "c1")
        proxy.freeze()  # for both: their leases end while no consumer can renew them
        eventually(lambda: leases_are_over(client), "the end of all leases")
        proxy.resume()
        eventually_shared(client, "c0", "c1")
        millstream_fresh_server.kill()
        time.sleep(1.2 * LEASE_MS / 1000)
        millstream_fresh_server.start()
        client.retry_while_unavailable(lambda: client.execute("PING"), what="test")
        eventually_shared(client, "c0", "c1")
    check_owners(client)


def leases_are_over(client: Client) -> bool:
    """Whether every consumer's leases have ended, by the server's clock."""
    return not client.execute("ZCOUNT", KEYS.alive, server_time_ms(client), "+inf")


def is_quiet(client: Client, key: str) -> bool:
    """Whether nothing is added for the time of a lease."""
    before = client.execute("XLEN", key)
    time.sleep(LEASE_MS / 1000)
    return bool(client.execute("XLEN", key) == before)


def moved(client: Client) -> int:
    """How often a stream has changed its owner for balance, or because an owner left."""
    found = Counter(items[1] for _, items in client.execute("XRANGE", KEYS.events, "-", "+"))
    assert not found[b"expired"], "a process stood still for longer than its lease: nothing can be said of moves"
    return found[b"released"]


def test_shares_stay_fair_from_one_to_five_to_two_owners_and_only_necessary_streams_move(
    client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    with ExitStack() as stack:
        owners = [stack.enter_context(owning(client, tmp_path, "c0", moves=0.2, lease_ms=LONG_MS))]
        eventually_shared(client, "c0")
        # What moves before all four are there could move twice: as if a great many had moved in this second already.
        client.execute("SET", f"{KEYS.base}:moves", 1_000_000)
        owners += [
            stack.enter_context(owning(client, tmp_path, f"c{n}", moves=0.2, lease_ms=LONG_MS)) for n in range(1, 5)
        ]
        eventually(lambda: len(counts(client)) == 5, "all five")
        assert counts(client) == {"c0": STREAMS, "c1": 0, "c2": 0, "c3": 0, "c4": 0}
        client.execute("DEL", f"{KEYS.base}:moves")
        eventually_shared(client, *(owner.name for owner in owners), within=0)
        steps = [moved(client)]
        assert steps == [STREAMS * 4 // 5], "one part for each that has come"
        while len(owners) > 2:  # one by one: of those that go at once, one may be given what another has left
            owner = owners.pop()
            has, before = counts(client)[owner.name], moved(client)
            owner.process.terminate()
            eventually_shared(client, *(one.name for one in owners), within=0)
            steps.append(moved(client) - before)
            assert steps[-1] == has, "what it had, and nothing else"
    print_figures(None, streams=STREAMS, moved_growing_then_shrinking=steps)
    check_owners(client)
