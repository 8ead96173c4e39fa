"""A node of a cluster that is down, and a cluster without slots: what a client, a tracker and a worker do then."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest

from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.deployments import _ClusterRoute
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_tracking import KeyTracker
from millstream.testing.topologies import Cluster, cluster
from millstream.worker import WorkerPolicy
from millstream.worker.changed_streams import ChangedStreams
from millstream.worker.in_flight import InFlight
from millstream.worker.ordering.unordered import Unordered
from tests.support.clocks import ManualClock
from tests.support.waiting import eventually
from tests.support.workers import double, make, make_context

pytestmark = [pytest.mark.groups]

HOUR_MS = 3_600_000.0


@pytest.fixture
def deployment() -> Iterator[Cluster]:
    with cluster() as made:
        for node in made.nodes:
            serve_partly(node)
        yield made


@pytest.fixture
def client(deployment: Cluster) -> Iterator[Client]:
    places = ",".join(f"127.0.0.1:{node.port}" for node in deployment.nodes)
    with Client(f"redis+cluster://{places}") as made:
        yield made


def serve_partly(node: EmbeddedServer) -> None:
    """Let it serve its slots while another node is down."""
    node.call("CONFIG", "SET", "cluster-require-full-coverage", "no")


def streams_on(client: Client, node: EmbeddedServer) -> Iterator[str]:
    """Yield names of streams that this node has."""
    for name in map("s{}".format, count()):
        primary = client.shard(name).primary
        if primary is not None and primary[1] == node.port:
            yield name


def test_a_worker_records_its_progress_on_other_nodes_after_one_has_used_up_the_time(
    deployment: Cluster, client: Client
) -> None:
    first, *others = deployment.nodes
    kept, lost = next(streams_on(client, others[0])), next(streams_on(client, first))
    clock = ManualClock()
    handler = make(double, pattern="s*", into=None)
    context = make_context(client, handler, in_flight=InFlight(WorkerPolicy(), 16), clock=clock)
    ordering = Unordered(context)
    for name in (kept, lost):
        ordering.join(name)
    first.kill()
    clock.step_ms = HOUR_MS  # each error comes later than any step may
    with pytest.raises(Unavailable):
        ordering.maintenance.run_once()
    assert client.execute("HEXISTS", context.keys_of(kept).meta, "checkpoint_at") == 1


def test_streams_of_a_node_that_was_down_are_queried_again(deployment: Cluster, client: Client) -> None:
    clock = ManualClock()
    changed = ChangedStreams(client, clock, lambda name: (name,))
    names = [f"s{number}" for number in range(200)]
    changed.find(names)
    dict(changed.exists(names))
    first = deployment.nodes[0]
    first.kill()
    assert set(changed.find(names)) == set(names)
    away = {name for name, reply in changed.exists(names) if isinstance(reply, Unavailable)}
    assert 10 < len(away) < len(names)
    first.start()
    serve_partly(first)
    eventually(lambda: is_served(client, min(away)), "the node to be back")
    clock.now_ms += 1_000
    assert away <= set(changed.find(names))
    assert not any(isinstance(reply, Exception) for _, reply in changed.exists(away))
    changed.close()


def is_served(client: Client, key: str) -> bool:
    try:
        return bool(client.execute("EXISTS", key) == 0)
    except Unavailable:
        return False


def test_a_command_for_any_primary_is_sent_to_each_before_it_fails(
    deployment: Cluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, reads, pools = deployment.nodes[0], count(), _ClusterRoute.pools

    def shuffled(route: _ClusterRoute) -> Sequence[Any]:
        """Return the pools with that of the first node one place further on each time."""
        found = sorted(pools(route), key=lambda pool: pool.connection_kwargs["port"] != first.port)
        return [*found[1 : (at := next(reads)) + 1], found[0], *found[at + 1 :]]

    monkeypatch.setattr(_ClusterRoute, pools.__name__, shuffled)
    first.kill()
    assert client.execute_on_any_primary("PING") == b"PONG"
    for node in deployment.nodes[1:]:
        node.kill()
    with pytest.raises(Unavailable):
        client.execute_on_any_primary("PING")


def test_a_cluster_whose_slots_have_no_owners_yet_is_unavailable_until_they_have() -> None:
    with (
        EmbeddedServer(extra={"cluster-enabled": "yes"}) as node,
        Client(f"redis+cluster://127.0.0.1:{node.port}") as one,
    ):
        for step in (
            lambda: one.execute("GET", "key"),
            lambda: one.execute_on_any_primary("PING"),
            lambda: one.execute_on_primaries("PING"),
            lambda: KeyTracker(one).changed(),
        ):
            with pytest.raises(Unavailable, match="no node of the cluster owns a hash slot"):
                step()
        node.call("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        eventually(lambda: is_served(one, "key"), "the slots to be served")
