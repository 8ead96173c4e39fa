"""Deployments that take seconds to start, lent to every test of a process that changes nothing of them but their keys."""

from contextlib import ExitStack

import pytest

from millstream.testing.topologies import Cluster, cluster

_lent_key = pytest.StashKey[Cluster]()


def lent_cluster(request: pytest.FixtureRequest) -> Cluster:
    """A Redis Cluster of three nodes, emptied; it stops when the last test of this process is over."""
    session = request.session
    if _lent_key not in session.stash:
        stack = ExitStack()
        session.stash[_lent_key] = stack.enter_context(cluster())
        session.addfinalizer(stack.close)
    found = session.stash[_lent_key]
    for node in found.nodes:
        node.call("FLUSHALL")
    return found
