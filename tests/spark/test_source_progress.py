"""The group in which a query shows its progress: whose it is."""

import pytest

from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.spark.source.offsets import Offsets, Position
from millstream.spark.source.progress_group import ProgressGroup
from tests.support.clocks import ManualClock

pytestmark = [pytest.mark.spark]

SHARED = "another query shows its progress in it"


def test_a_query_that_begins_behind_its_progress_group_warns_of_another_query(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [EntryId.parse(one) for one in client.pipeline([("XADD", "s", "*", "n", n) for n in range(30)])]
    ProgressGroup(client, "g").publish(Offsets({"s": Position(ids[9], 10)}))
    ProgressGroup(client, "g").publish(Offsets({"s": Position(ids[19], 20)}))
    assert SHARED not in caplog.text, "a restart"
    behind = ProgressGroup(client, "g")
    behind.publish(Offsets({"s": Position(ids[4], 5)}))
    assert caplog.text.count(SHARED) == 1
    assert f"is at {ids[19]}, and this query at {ids[4]}" in caplog.text
    assert 'option("group", NAME)' in caplog.text
    ProgressGroup(client, "g", is_handler_group=True).publish(Offsets({"s": Position(ids[3], 4)}))
    assert caplog.text.count(SHARED) == 1, "a handler that is run again from the beginning"


def test_two_queries_with_one_progress_group_are_detected(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    ids = [EntryId.parse(one) for one in client.pipeline([("XADD", "s", "*", "n", n) for n in range(30)])]
    one, other = ProgressGroup(client, "g", clock=clock), ProgressGroup(client, "g")
    one.publish(Offsets({"s": Position(ids[9], 10)}))
    other.publish(Offsets({"s": Position(ids[19], 20)}))
    one.publish(Offsets({"s": Position(ids[10], 11)}))
    other.publish(Offsets({"s": Position(ids[20], 21)}))
    assert SHARED not in caplog.text
    clock.now_ms += 10_001
    for n in (11, 12, 13):
        one.publish(Offsets({"s": Position(ids[n], n + 1)}))
        other.publish(Offsets({"s": Position(ids[n + 10], n + 11)}))
    assert caplog.text.count(SHARED) == 1
