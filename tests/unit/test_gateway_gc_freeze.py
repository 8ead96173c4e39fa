"""When full garbage collections take place beside many connections."""

import gc
from collections.abc import Iterator

import pytest

from millstream.services.gateway.gc_freeze import ConnectionCounts, GcFreeze

pytestmark = [pytest.mark.router]


class Knot:
    """Refers to itself, so that only a collection frees it."""

    alive = 0

    def __init__(self) -> None:
        self.me = self
        Knot.alive += 1

    def __del__(self) -> None:
        Knot.alive -= 1


@pytest.fixture(autouse=True)
def no_automatic_collections() -> Iterator[None]:
    """Nothing is collected but on request. Afterwards all that is alive is frozen, as after the collection of the tests."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def test_connections_stay_frozen_until_as_many_have_closed_as_are_open() -> None:
    traffic = ConnectionCounts(0, 0)
    pauses = GcFreeze(lambda: traffic)
    Knot()
    traffic = ConnectionCounts(5_000, 0)
    pauses.update()
    frozen = gc.get_freeze_count()
    assert frozen > 0
    gc.collect()
    assert Knot.alive == 1, "it is frozen"
    traffic = ConnectionCounts(5_050, 5_000)
    pauses.update()
    assert gc.get_freeze_count() <= frozen, "hardly more have come"
    gc.collect()
    assert Knot.alive == 1, "not enough have left"
    traffic = ConnectionCounts(5_050, 5_051)
    pauses.update()
    assert Knot.alive == 0
    assert gc.get_freeze_count() > 0
